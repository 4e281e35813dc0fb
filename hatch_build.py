"""Build hook of hatch: a wheel carries the C++ kernels, compiled for every instruction-set level.

Where no C++ compiler is found the wheel is pure Python, and the kernels are compiled on first use, if there
is a compiler then.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IN_PACKAGE = "stemma/native/prebuilt"


class KernelsHook(BuildHookInterface):
    """Compiles the kernels into the wheel and gives it the platform's tag."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries that can be compiled here; an editable install compiles on first use instead."""
        if version == "editable" or sys.platform != "linux":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from stemma.native.building import BuildFailed, build, find_compiler
        from stemma.native.levels import LEVELS, Level

        if find_compiler() is None:
            self.app.display_warning("no C++ compiler found: the wheel carries no kernels")
            return
        self._folder = tempfile.TemporaryDirectory(prefix="stemma-kernels-")

        def compile_level(level: Level) -> Path | None:
            try:
                return build(level, Path(self._folder.name))
            except BuildFailed as error:
                self.app.display_warning(f"no kernels of level {level.name}: {error}")
                return None

        with ThreadPoolExecutor() as workers:
            libraries = [path for path in workers.map(compile_level, LEVELS) if path is not None]
        for library in libraries:
            build_data["force_include"][str(library)] = f"{_IN_PACKAGE}/{library.name}"
        if libraries:
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled; the wheel has its copy."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
