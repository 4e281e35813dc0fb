"""Build hook of hatch: a wheel carries the C++ kernels, compiled for every instruction-set level.

A level that doesn't compile fails the build: a wheel without it would be slow without a word. Who wants such
a wheel says so: `STEMMA_WHEEL_LEVELS` names the levels that it carries, `none` for a wheel of Python alone.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IN_PACKAGE = "stemma/native/prebuilt"
_VARIABLE = "STEMMA_WHEEL_LEVELS"
_FROM_TORCH = frozenset({"libgomp.so.1"})
"""Libraries that the wheel doesn't bring: torch has loaded its own before the kernels are."""


class KernelsHook(BuildHookInterface):
    """Compiles the kernels into the wheel and gives it the platform's tag."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile and add the libraries; an editable install compiles on first use instead."""
        if version == "editable" or sys.platform != "linux":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from stemma.native.building import build
        from stemma.native.compiling import BuildFailed

        levels = _wanted_levels()
        if not levels:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="stemma-kernels-")
        folder = Path(self._folder.name)
        try:
            libraries = build(levels, folder)
        except BuildFailed as error:
            raise RuntimeError(
                f"{error}. {_VARIABLE}=... names the levels that the wheel is to carry, separated by commas; "
                "none: a wheel without kernels"
            ) from error
        for library in libraries:
            build_data["force_include"][str(library)] = f"{_IN_PACKAGE}/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(libraries, folder)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled; the wheel has its copy."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _wanted_levels() -> list[Any]:
    from stemma.native.levels import LEVELS, architecture, level_named

    named = os.environ.get(_VARIABLE, "")
    if named == "none":
        return []
    if named:
        return [level_named(name.strip()) for name in named.split(",")]
    return [level for level in LEVELS if not level.features or level.architecture == architecture()]


def _platform_tag(libraries: list[Path], folder: Path) -> str:
    """Return the manylinux tag that auditwheel gives a wheel of these libraries.

    It goes by the symbols of the C and C++ libraries that they need. The tag is part of the wheel's name,
    which is settled before the wheel is there: a small one of the libraries alone is examined.
    """
    from auditwheel.architecture import Architecture
    from auditwheel.libc import Libc
    from auditwheel.wheel_abi import analyze_wheel_abi

    linux = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    wheel = folder / f"kernels-0-py3-none-{linux}.whl"
    names = [f"{_IN_PACKAGE}/{library.name}" for library in libraries]
    with zipfile.ZipFile(wheel, "w") as archive:
        for library, name in zip(libraries, names, strict=True):
            archive.write(library, name)
        archive.writestr(
            "kernels-0.dist-info/WHEEL",
            f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{linux}\n",
        )
        archive.writestr("kernels-0.dist-info/METADATA", "Metadata-Version: 2.1\nName: kernels\nVersion: 0\n")
        archive.writestr("kernels-0.dist-info/RECORD", "".join(f"{name},,\n" for name in names))
    found = analyze_wheel_abi(
        Libc.detect(),
        Architecture.detect(),
        wheel,
        _FROM_TORCH,
        disable_isa_ext_check=True,  # the processor's level is looked up before a library is loaded
        allow_graft=False,
    )
    return str(found.overall_policy.name)
