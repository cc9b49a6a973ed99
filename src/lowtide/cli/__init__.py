"""The `lowtide` command: what the library does, from a terminal.

    lowtide plan train.py:make --budget 12GiB -o plan.json

It uses lowtide's public names only. typer and rich come with the extra `cli`.
"""

from __future__ import annotations

import sys

_INSTALL = "pip install 'lowtide[cli]'"


def main() -> None:
    """Run the command; where typer or rich is missing, say how to get them."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"the lowtide command needs {error.name}, which is not installed: {_INSTALL}")
    from lowtide.cli.app import app

    app(prog_name="lowtide")
