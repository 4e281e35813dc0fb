"""transformers' list of its models, read once instead of twice.

`import transformers` reads 1,700 files for the names that they export, and `import transformers.models` reads
them again, since the cache between has room for 128 of 550 folders: 0.2 s of a server's start. The second
list is the first one under shorter names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, TypeAlias

Exports: TypeAlias = dict[frozenset[str], dict[str, set[str]]]
"""Names of objects by module, by what they need."""
_PACKAGE = "transformers.models"


def import_models() -> None:
    """Import `transformers.models`, if nobody has yet, without reading its list again.

    Where transformers is another than the ones we know, it does what it does.
    """
    if _PACKAGE in sys.modules:
        return
    import transformers
    from transformers.utils import import_utils

    own: Any = getattr(import_utils, "define_import_structure", None)
    if own is None:
        return
    folder = Path(str(transformers.__file__)).parent / "models"

    def define_import_structure(module_path: str, prefix: str | None = None) -> Exports:
        if prefix is None and Path(module_path) == folder / "__init__.py":
            # The same call as in transformers/__init__.py, so its cache has the result.
            found = without_prefix(own(folder, prefix="models"), "models.")
            if names_all(found, folder):
                return found
        result: Exports = own(module_path, prefix)
        return result

    import_utils.define_import_structure = define_import_structure  # type: ignore[assignment]
    try:
        import transformers.models
    finally:
        import_utils.define_import_structure = own


def without_prefix(exports: Exports, prefix: str) -> Exports:
    """Return the modules whose names begin with `prefix`, without it."""
    found: Exports = {}
    for needed, modules in exports.items():
        inside = {name.removeprefix(prefix): own for name, own in modules.items() if name.startswith(prefix)}
        if inside:
            found[needed] = inside
    return found


def names_all(exports: Exports, folder: Path) -> bool:
    """Whether modules of all packages in a folder are listed."""
    listed = {name.partition(".")[0] for modules in exports.values() for name in modules}
    with os.scandir(folder) as entries:
        missing = [entry.path for entry in entries if entry.name not in listed and entry.is_dir()]
    return not any(file.name != "__init__.py" for path in missing for file in Path(path).glob("*.py"))
