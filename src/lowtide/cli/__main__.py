"""`python -m lowtide.cli`: the `lowtide` command, for environments whose scripts are not on the PATH."""

from __future__ import annotations

from lowtide.cli import main

if __name__ == "__main__":
    main()
