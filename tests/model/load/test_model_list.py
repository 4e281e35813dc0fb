"""transformers' list of models, made once, is the list that it makes itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from stemma.model.load.model_list import names_all, without_prefix

SCRIPT = """
import sys, transformers
from transformers.utils import import_utils
from stemma.model.load.model_list import import_models

own = import_utils.define_import_structure
num_read = import_utils.create_import_structure_from_path.cache_info().misses
import_models()
assert import_utils.create_import_structure_from_path.cache_info().misses == num_read, "read again"
assert import_utils.define_import_structure is own
models = sys.modules["transformers.models"]
used = models._import_structure
import_models()  # does nothing
assert sys.modules["transformers.models"] is models
plain = type(models)("plain", models.__file__, own(models.__file__), module_spec=models.__spec__)
assert {name: set(own) for name, own in used.items()} == {
    name: set(own) for name, own in plain._import_structure.items()
}
assert models._class_to_module == plain._class_to_module
assert models._object_missing_backend == plain._object_missing_backend
from transformers import AutoTokenizer, Qwen2Config
"""


def test_the_list_is_read_once_and_is_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_list_without_some_package_is_not_taken(tmp_path: Path) -> None:
    """What another version keeps there may be something else."""
    for name in ("llama", "old", "__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    whole = {frozenset[str](): {"models.llama.modeling_llama": {"Llama"}, "utils": {"x"}}}
    found = without_prefix(whole, "models.")
    assert found == {frozenset(): {"llama.modeling_llama": {"Llama"}}}
    assert names_all(found, tmp_path)
    (tmp_path / "old" / "modeling_old.py").touch()
    assert not names_all(found, tmp_path)
    assert not names_all({}, tmp_path)
