"""Peaks of CPU memory by torch.profiler's events, and counts of live tensors: independent of lowtide's own meters."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints each start and stop


def peak_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """What `call()` returns, and the most bytes that it had allocated and not yet freed at one time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = call()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    live: dict[int, int] = {}  # bytes by address, of what was allocated since the start
    total = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        address, change = event["args"]["Addr"], event["args"]["Bytes"]
        if change > 0:
            live[address] = change
            total += change
            peak = max(peak, total)
        else:
            total -= live.pop(address, 0)
    return result, peak


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def num_live_tensors() -> int:
    """Tensors that Python's collector knows of, apart from those that `gc.freeze()` has hidden."""
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
