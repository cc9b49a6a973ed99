"""What benchmarks share: a timer, what stands above results, and where they go."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lowtide

RESULTS = Path(__file__).parent / "results"


def timed(call: Callable[[], Any], device: str) -> float:
    """Seconds that a call takes, what it started on the device included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


def versions() -> str:
    """Date and versions, for the line under a title."""
    return (
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"lowtide {lowtide.__version__}"
    )


def save(lines: list[str], folder: Path, name: str, *, quietly: bool = False) -> None:
    """Keep a page of results, and print it."""
    text = "\n".join(lines) + "\n"
    if not quietly:
        print(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
