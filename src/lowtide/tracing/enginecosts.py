"""What the eager engine adds on the host: measured once per machine, and kept in a small file.

Measuring is the engine's own business: it registers what does it. Results are kept in the process, and under
`LOWTIDE_CACHE_DIR`, or lowtide's folder in `XDG_CACHE_HOME` or `~/.cache`, by machine, device and versions. Where that
cannot be written, every process measures for itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from lowtide.units import own_version


class EngineCosts(NamedTuple):
    """Seconds on the host, as the fields of `Hardware` that have these names."""

    region_s: float = 0.0
    save_s: float = 0.0
    dispatch_s: float = 0.0
    spare_s: float = 0.0
    move_s: float = 0.0


# For devices that are not here: as measured on the host of an H200, torch 2.11.
ENGINE_COSTS = EngineCosts(region_s=120e-6, save_s=17e-6, dispatch_s=35e-6, move_s=50e-6)

_measures: list[Callable[[torch.device], EngineCosts]] = []
_known: dict[str, EngineCosts] = {}


def register(measure: Callable[[torch.device], EngineCosts]) -> None:
    """Let `measure` say what the engine costs."""
    _measures[:] = [measure]


def engine_costs(device: torch.device) -> EngineCosts:
    """What the engine adds on the host of this machine, for steps on `device`."""
    key = _key(device)
    if key not in _known:
        path = cache_folder() / f"engine-costs-{key}.json"
        found = _read(path)
        if found is None and _measures:
            found = _measures[0](device)
            _write(path, found)
        _known[key] = found or EngineCosts()
    return _known[key]


def cache_folder() -> Path:
    """The folder for what is measured once per machine; it need not be there."""
    if own := os.environ.get("LOWTIDE_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base) / "lowtide" if base else Path.home() / ".cache" / "lowtide"
    except RuntimeError:  # nobody's home
        return Path(tempfile.gettempdir()) / "lowtide"


def _key(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    facts = [platform.node(), platform.machine(), platform.processor(), str(os.cpu_count()), name]
    facts += [platform.python_version(), torch.__version__, own_version()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _read(path: Path) -> EngineCosts | None:
    try:
        content = json.loads(path.read_text())
        found = EngineCosts(**{name: float(content[name]) for name in EngineCosts._fields})
    except (OSError, ValueError, TypeError, KeyError):  # not there, or damaged: measured again
        return None
    return found if all(0 <= each < math.inf for each in found) else None


def _write(path: Path, costs: EngineCosts) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(costs._asdict(), file)
        os.replace(file.name, path)
