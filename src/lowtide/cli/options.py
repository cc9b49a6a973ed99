"""Typer options that several commands share, and parsing of sizes such as `12GiB`, with suggestions for typos."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import nn

import lowtide
from lowtide.cli.output import UsageError, did_you_mean
from lowtide.errors import UnitError
from lowtide.store import LOSSY_CODECS
from lowtide.units import parse_bytes

SCRIPT_HELP = "A script and a function in it: train.py:make. The function takes no arguments and returns "
SCRIPT_HELP += "(model, loss_fn, batch), with an optimizer after them if there is one, or a dict with these names."

Script = Annotated[str, typer.Argument(metavar="SCRIPT:FUNCTION", help=SCRIPT_HELP, show_default=False)]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan written by `lowtide plan -o plan.json`.")]
Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        metavar="BYTES",
        help="Memory for the whole step: 12GiB, 12GB, 512MiB, whole bytes, or 80% of the device.",
    ),
]
Host = Annotated[str | None, typer.Option(metavar="BYTES", help="Host memory that activations may be moved to.")]
Lossy = Annotated[
    str | None,
    typer.Option(
        metavar="CODEC", help="Allow compression by this codec, such as int8: gradients are then approximate."
    ),
]
SplitFlag = Annotated[
    bool,
    typer.Option(
        "--split", help="Allow the loss and MLPs to run a few rows at a time: gradients may differ in the last bits."
    ),
]
Engine = Annotated[Literal["eager", "compiled"], typer.Option(help="The engine that will run the plan.")]
Fake = Annotated[bool, typer.Option("--fake", help="Trace on fake tensors: nothing is allocated, nothing runs.")]
Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The device to plan for, if not the model's own: cuda, or a name such as H100."),
]
TimeLimit = Annotated[float | None, typer.Option("--time-limit-s", help="Seconds that solving may take.", min=0.01)]

# A number without a unit below this is taken for a number of GiB whose unit was forgotten.
_FEWEST_BARE_BYTES = 1024


def size(option: str, typed: str, *, total_bytes: int | None = None) -> int | str:
    """Return `typed` as the library takes it: an int, or text with a unit. Raises `UsageError`, with a suggestion.

    A share such as 80% is an error without `total_bytes`.
    """
    text = typed.strip()
    if text.isascii() and text.isdecimal():
        if int(text) == 0:
            raise UsageError(f"{option}: {typed} is 0 bytes. Write a size with a unit, such as 12GiB.")
        if int(text) < _FEWEST_BARE_BYTES:
            raise UsageError(f"{option}: {typed} would be {text} bytes. Did you mean {text}GiB?")
        return int(text)
    try:
        parse_bytes(text, total_bytes=total_bytes)
    except UnitError as error:
        raise UsageError(f"{option}: {error}{_meant(text)}") from None
    return text


def budget(typed: str) -> int | str:
    """Return `--budget` as the library takes it. A share such as 80% is allowed: the device is known later."""
    return size("--budget", typed, total_bytes=1 << 62)


def check_device(name: str | None) -> None:
    """Raise `UsageError` if `--device` names no known device, which tracing a step of one layer for it shows.

    Call it after the script was loaded, as scripts may register devices.
    """
    if name is None:
        return
    model = nn.Linear(1, 1)
    try:
        lowtide.trace(model, lambda x: model(x).sum(), torch.ones(1, 1), mode="fake", device=name)
    except RuntimeError as error:
        raise UsageError(f"--device: {error}") from None


def _meant(text: str) -> str:
    """Return a suggestion for sizes such as `12G`, `12 gigs` and `12,5GiB`; empty for others."""
    match = re.fullmatch(r"(\d+)(?:[.,](\d+))?\s*([kmgt])\w*", text, re.IGNORECASE)
    if match is None:
        return ""
    number = f"{match[1]}.{match[2]}" if match[2] else match[1]
    return f" Did you mean {number}{match[3].upper()}iB?"


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def moves(host: str | None, lossy: str | None) -> dict[str, Any]:
    """Return the options of `lowtide.solve` that allow more than recomputing, as far as they were given."""
    if lossy is not None and lossy not in LOSSY_CODECS:
        near = did_you_mean(lossy, LOSSY_CODECS)
        raise UsageError(f"--lossy: {lossy!r} is not a lossy codec.{near} There are {', '.join(LOSSY_CODECS)}.")
    return given(host=None if host is None else size("--host", host), lossy=lossy)
