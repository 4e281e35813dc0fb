"""Write the pages: ``python -m reference_pages [DOCS]``."""

from __future__ import annotations

import gc
import sys
from pathlib import Path


def main(docs: Path) -> None:
    """Write the pages below `docs`."""
    gc.disable()  # a third of the time of imports would go into looks at what they make
    from reference_pages.pages import write_pages

    write_pages(docs)


main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs"))
