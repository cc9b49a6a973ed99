"""Where the command's words go: results to stdout, as text or JSON; progress, notes and errors to stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_PIPE_WIDTH = 200


class Output:
    """What one command shows. Progress is for terminals: it is silent in a pipe, and with `--quiet`."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, debug: bool = False) -> None:
        self.as_json, self.quiet, self.debug = as_json, quiet, debug
        # A pipe has no width: lines are not to be broken there at a terminal's.
        self._results = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        self._notes = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def result(self, text: RenderableType, data: dict[str, Any]) -> None:
        """The command's answer: `text` for people, `data` for machines."""
        if self.as_json:
            self._print_json(data)
        else:
            self._results.print(text, markup=False, soft_wrap=isinstance(text, str))

    def note(self, text: str) -> None:
        """Something worth knowing beside the answer."""
        if not self.quiet:
            self._notes.print(text, markup=False, style="dim")

    def error(self, text: str, data: dict[str, Any]) -> None:
        """Why there is no answer."""
        self._notes.print("Error: ", style="bold red", end="")
        self._notes.print(text, markup=False)
        if self.as_json:
            self._print_json({**data, "message": text})

    @contextlib.contextmanager
    def working(self, num_stages: int) -> Iterator[Stages]:
        """A block of work in stages, with a bar that goes away at its end.

        What user code prints meanwhile goes to stderr, so that results stay alone on stdout.
        """
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        shows = not self.quiet and self._notes.is_terminal
        with contextlib.redirect_stdout(sys.stderr):
            with Progress(
                *columns, console=self._notes, transient=True, refresh_per_second=4, disable=not shows
            ) as bar:
                yield Stages(bar, num_stages)

    @staticmethod
    def _print_json(data: dict[str, Any]) -> None:
        print(json.dumps(data, indent=2))


class Stages:
    """Steps of a piece of work: each call begins the next one."""

    def __init__(self, bar: Progress, num_stages: int) -> None:
        self._bar, self._begun = bar, False
        self._task = bar.add_task("", total=num_stages)

    def __call__(self, description: str) -> None:
        self._bar.update(self._task, description=description, advance=int(self._begun))
        self._begun = True
