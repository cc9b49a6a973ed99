"""Where benchmark results go, and what stands above them."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path

import torch

import lowtide

RESULTS = Path(__file__).parent / "results"


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


def versions() -> str:
    """Date and versions, for the line under a title."""
    return (
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"lowtide {lowtide.__version__}"
    )


def save(lines: list[str], folder: Path, name: str) -> None:
    """Print a page of results and keep it."""
    text = "\n".join(lines) + "\n"
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
