"""``python -m stemma`` is the ``stemma`` command."""

from stemma.cli import main

if __name__ == "__main__":
    main()
