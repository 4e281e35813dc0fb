"""Compiles the kernels' units before torch is there to link them with: `python -m stemma.native.ahead`.

`make` runs it beside pip, which mostly waits; the first start then only links. It needs no package.
"""

from __future__ import annotations

import os
from contextlib import suppress

from stemma.errors import ConfigError
from stemma.native.building import build_ahead
from stemma.native.compiling import BuildFailed
from stemma.native.levels import choose_level


def main() -> None:
    """Compile for this processor, in time that others leave; a failure is for the first start to say."""
    os.nice(19)
    with suppress(BuildFailed, ConfigError):
        build_ahead(choose_level().level)


if __name__ == "__main__" and os.environ.get("STEMMA_NATIVE") != "0":
    main()
