"""`python -m fuzz`. The command is in `run`: processes started by "spawn" cannot import from a `__main__`."""

from __future__ import annotations

import sys

from fuzz.run import main

if __name__ == "__main__":
    sys.exit(main())
