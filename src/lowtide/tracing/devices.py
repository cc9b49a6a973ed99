"""Speeds and memory of devices, for predicted op times; and what the eager engine costs the host on this machine.

`DEVICES` is a table of common accelerators, so that a step can be traced for a device that this machine does not have
(`trace(..., device="H100")`). FLOP/s and bandwidths are the vendors' figures without sparsity; `MATMUL_EFFICIENCY`
and `MEMORY_EFFICIENCY` are the shares that large kernels reach. Link speeds are those of pinned copies over the usual
PCIe slot. For the device that the trace runs on, `link_bytes_per_s` and `free_bytes` measure.

`engine_costs` are host seconds per region, saved tensor, dispatched op, retained output and move of a plan, which the
simulator adds to the host's time line. `eager.host_costs` registers the function that measures them, since this
package must not import `eager`. They are measured once per machine, device and versions, in a few seconds, and cached
as JSON under `LOWTIDE_CACHE_DIR`, else in lowtide's folder in `XDG_CACHE_HOME` or `~/.cache`. If that folder cannot
be written, every process measures again. They are kept for a host of a given speed (`host_speed`), and a trace scales
them to the speed of its own moment. Fake traces for accelerators take `ENGINE_COSTS`, measured on the host of an
H200.
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
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from lowtide import _compat
from lowtide.graph.step_graph import Hardware
from lowtide.store.transfer import host_bytes
from lowtide.tracing.host_speed import REFERENCE_S
from lowtide.units import own_version

_GIB = 1024**3

# Share of the peak FLOP/s that matrix products reach, and of the peak bandwidth that memory-bound kernels reach.
MATMUL_EFFICIENCY = 0.6
MEMORY_EFFICIENCY = 0.75
LAUNCH_S = 3e-6
# Host seconds to issue (an op, a view), including the model's Python around it, in the forward and in the backward:
# means over six models on the host of an H200. They vary by half between models, and between days.
FORWARD_ISSUE_S, BACKWARD_ISSUE_S = (28e-6, 5e-6), (22e-6, 9e-6)
# cuBLAS keeps a workspace for the thread of the forward and one for that of the backward.
CUBLAS_BYTES = 65 << 20

DEVICES: dict[str, Hardware] = {
    device.name: device
    for device in (
        Hardware("V100", 32 * _GIB, 125e12, 15.7e12, 0.9e12, 11e9),
        Hardware("T4", 16 * _GIB, 65e12, 8.1e12, 0.32e12, 11e9),
        Hardware("A10G", 24 * _GIB, 70e12, 35e12, 0.6e12, 22e9),
        Hardware("A100", 80 * _GIB, 312e12, 19.5e12, 2.0e12, 22e9),
        Hardware("A100-40GB", 40 * _GIB, 312e12, 19.5e12, 1.56e12, 22e9),
        Hardware("L4", 24 * _GIB, 121e12, 30e12, 0.3e12, 22e9),
        Hardware("L40S", 48 * _GIB, 362e12, 91e12, 0.86e12, 22e9),
        Hardware("RTX 3090", 24 * _GIB, 71e12, 35.6e12, 0.94e12, 22e9),
        Hardware("RTX 4090", 24 * _GIB, 165e12, 82e12, 1.0e12, 22e9),
        Hardware("RTX 5090", 32 * _GIB, 210e12, 105e12, 1.79e12, 50e9),
        Hardware("H100", 80 * _GIB, 989e12, 67e12, 3.35e12, 50e9),
        Hardware("H200", 141 * _GIB, 989e12, 67e12, 4.8e12, 50e9),
        Hardware("B200", 180 * _GIB, 2250e12, 80e12, 8.0e12, 50e9),
        Hardware("MI300X", 192 * _GIB, 1307e12, 163e12, 5.3e12, 50e9),
    )
}


def register_device(hardware: Hardware) -> None:
    """Add a device to the table, for `trace(..., device=name)`."""
    DEVICES[hardware.name] = hardware


def named_device(name: str) -> Hardware | None:
    """Return the device of that name (in any case) in the table, or None."""
    wanted = name.strip().lower()
    return next((device for known, device in DEVICES.items() if known.lower() == wanted), None)


def present_device(device: torch.device) -> Hardware:
    """Return the facts of a device of this machine: of CUDA those of the longest name that matches, else the A100's."""
    if device.type == "cpu":
        cores = os.cpu_count() or 1
        return Hardware("cpu", host_bytes(), 3e10 * cores, 3e10 * cores, 1.5e10)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
        words = name.replace("-", " ").lower().split()
        known = [item for item in DEVICES.values() if all(word in words for word in item.name.lower().split())]
        similar = max(known, key=lambda item: len(item.name), default=DEVICES["A100"])
        return replace(similar, name=name, memory_bytes=memory)
    return replace(DEVICES["A100"], name=str(device), memory_bytes=0)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that a step could still allocate on a device, including memory cached by torch's allocator."""
    if device.type == "cpu":
        if not hasattr(os, "sysconf") or "SC_AVPHYS_PAGES" not in os.sysconf_names:
            return 1 << 62
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 1 << 62


class AllocatedBytes(NamedTuple):
    """Bytes allocated now, and the peaks of what was allocated and of what tensors had asked for.

    A tensor may be given a cached block that is larger by up to 1 MiB, which counts as allocated in full.
    """

    now: int
    peak: int
    requested_peak: int


def read_allocator(device: torch.device) -> AllocatedBytes:
    """Return what is allocated on a CUDA device, with the peaks since the last call of this function."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, requested = stats["allocated_bytes"]["all"], stats["requested_bytes"]["all"]
    torch.cuda.reset_peak_memory_stats(device)
    return AllocatedBytes(allocated["current"], allocated["peak"], requested["peak"])


def link_bytes_per_s(device: torch.device) -> float:
    """Measure the bandwidth of pinned copies between device and host, in the slower direction; 0 on the CPU."""
    if device.type != "cuda":
        return 0.0
    slowest, num_bytes = 0.0, 1 << 26
    # May be called while torch.compile runs on fake tensors. Events are recorded on the present device's stream.
    with torch.cuda.device(device), _compat.without_fake_mode():
        there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        for target, source in ((there, here), (here, there)):
            times = []
            for _ in range(3):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                target.copy_(source, non_blocking=True)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 1e3)
            slowest = max(slowest, min(times))
    return num_bytes / slowest


def block_bytes(device: torch.device) -> int:
    """Return the allocator's granularity, to which sizes are rounded up."""
    return 512 if device.type == "cuda" else 1


def trace_device(device: torch.device) -> torch.device:
    """Return the device with its index, as tensors report it."""
    if device.type == "cuda" and device.index is None and _compat.accelerator() is not None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class EngineCosts(NamedTuple):
    """Host seconds that the eager engine adds; the fields of `Hardware` with the same names explain each."""

    region_s: float = 0.0
    save_s: float = 0.0
    dispatch_s: float = 0.0
    spare_s: float = 0.0
    move_s: float = 0.0

    def scaled(self, factor: float) -> EngineCosts:
        """Return the costs on a host that takes `factor` times as long."""
        return EngineCosts(*(factor * each for each in self))


# For devices that this machine does not have: measured on the host of an H200, torch 2.11.
ENGINE_COSTS = EngineCosts(region_s=120e-6, save_s=17e-6, dispatch_s=35e-6, move_s=50e-6)

_measures: list[Callable[[torch.device], EngineCosts]] = []
_known: dict[str, EngineCosts] = {}


def register(measure: Callable[[torch.device], EngineCosts]) -> None:
    """Set the function that measures the engine's costs."""
    _measures[:] = [measure]


def engine_costs(device: torch.device) -> EngineCosts:
    """Return the engine's costs for steps on `device`: cached, or measured now.

    They are for a host on which `host_speed.probe_s` returns `REFERENCE_S`.
    """
    key = _key(device)
    if key not in _known:
        path = cache_folder() / f"engine-costs-{key}.json"
        costs = _read(path)
        if costs is None and _compat.profiler_is_active():  # it takes part of the time, and would record all of it
            return ENGINE_COSTS
        if costs is None and _measures:
            costs = _measures[0](device)
            if _is_plausible(costs):  # else the next process measures again
                _write(path, costs)
        _known[key] = costs or EngineCosts()
    return _known[key]


def cache_folder() -> Path:
    """Return the folder for measurements of this machine; it may not exist yet."""
    if own := os.environ.get("LOWTIDE_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base) / "lowtide" if base else Path.home() / ".cache" / "lowtide"
    except RuntimeError:  # the user has no home directory
        return Path(tempfile.gettempdir()) / "lowtide"


def _key(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    facts = [platform.node(), platform.machine(), platform.processor(), str(os.cpu_count()), name]
    facts += [platform.python_version(), torch.__version__, own_version(), f"probe of {REFERENCE_S} s"]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _read(path: Path) -> EngineCosts | None:
    try:
        content = json.loads(path.read_text())
        costs = EngineCosts(**{name: float(content[name]) for name in EngineCosts._fields})
    except (OSError, ValueError, TypeError, KeyError):  # missing or damaged: measure again
        return None
    return costs if _is_plausible(costs) else None


def _is_plausible(costs: EngineCosts) -> bool:
    """Whether nothing disturbed the measurement so much that a region seems to cost nothing."""
    return all(0 <= each < math.inf for each in costs) and costs.region_s + costs.save_s > 0


def _write(path: Path, costs: EngineCosts) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(costs._asdict(), file)
        os.replace(file.name, path)
