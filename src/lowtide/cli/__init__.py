"""The `lowtide` command: estimate, plan, compare and report from a terminal.

    lowtide plan train.py:make --budget 12GiB -o plan.json

It uses lowtide's public names only. It needs typer and rich, from the extra `cli`; `main` says so if they are missing.
"""

from __future__ import annotations

import sys

_INSTALL = "pip install rich typer"


def main() -> None:
    """Run the command, or exit with the pip command if typer or rich is missing."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"the lowtide command needs {error.name}, which is not installed: {_INSTALL}")
    from lowtide.cli.app import app

    app(prog_name="lowtide")
