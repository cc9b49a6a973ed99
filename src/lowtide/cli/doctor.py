"""What `lowtide doctor` looks at: versions, devices, the link to host memory, limits, and other checkpointing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import lowtide
from lowtide.cli.script import Job
from lowtide.units import format_bytes

_OLDEST_TORCH = (2, 11)
_OTHERS = ("triton", "transformers", "matplotlib", "deepspeed", "fairscale", "trl", "accelerate", "lightning")
_PINNED_BYTES = 64 << 20

# Set by people and launchers, and what each means for a plan.
_VARIABLES = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "torch's allocator is off: peaks and times are not those of a training run",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the host: copies cannot run beside compute",
    "PYTORCH_CUDA_ALLOC_CONF": "the allocator is set up by hand; lowtide's peaks are of allocated bytes, as ever",
    "PYTORCH_ALLOC_CONF": "the allocator is set up by hand; lowtide's peaks are of allocated bytes, as ever",
}


@dataclass(frozen=True)
class Finding:
    """One thing seen. A `problem` stops lowtide from working, a `note` is worth knowing; `value` is for machines."""

    group: str
    name: str
    text: str
    value: Any = None
    status: Literal["ok", "note", "problem"] = "ok"

    def as_json(self) -> dict[str, Any]:
        return {"group": self.group, "name": self.name, "status": self.status, "text": self.text, "value": self.value}


def examine(job: Job | None, stage: Callable[[str], None]) -> list[Finding]:
    """Everything there is to know; with a job, of its model too."""
    found: list[Finding] = []
    looks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("versions", _versions),
        ("devices and their links", _devices),
        ("limits", _limits),
        ("other checkpointing", lambda: _conflicts(job)),
    )
    for name, look in looks:
        stage(f"looking at {name}")
        found += look()
    return found


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "lowtide", lowtide.__version__, lowtide.__version__)
    yield Finding("versions", "python", platform.python_version(), platform.python_version())
    is_old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST_TORCH
    wanted = f" (lowtide needs {'.'.join(map(str, _OLDEST_TORCH))} or newer)" if is_old else ""
    yield Finding("versions", "torch", torch.__version__ + wanted, torch.__version__, "problem" if is_old else "ok")
    for name in ("numpy", "scipy", *_OTHERS):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        yield Finding("versions", name, version, version)


def _devices() -> Iterator[Finding]:
    memory = _host_memory_bytes()
    yield Finding("devices", "cpu", f"{os.cpu_count()} cores, {format_bytes(memory)}", {"memory_bytes": memory})
    if not torch.accelerator.is_available():
        yield Finding(
            "devices",
            "accelerator",
            "none: activations cannot be moved to the host from here. Plan for one that is elsewhere: --device H100",
            status="note",
        )
        return
    kind = torch.accelerator.current_accelerator()
    for index in range(torch.accelerator.device_count()):
        yield from _accelerator(torch.device(str(kind), index))


def _accelerator(device: torch.device) -> Iterator[Finding]:
    """A device as `lowtide.trace` sees it: a small step is traced there, which also measures the link."""
    try:
        model = nn.Linear(64, 64).to(device)
        graph = lowtide.trace(model, lambda x: model(x).sum(), torch.randn(8, 64, device=device), mode="real")
    except Exception as error:  # whatever is wrong with the device is what is asked for
        first_line = str(error).splitlines()[0] if str(error) else ""
        yield Finding(
            "devices", str(device), f"a small step fails: {type(error).__name__}: {first_line}", None, "problem"
        )
        return
    hardware = graph.hardware
    yield Finding(
        "devices",
        str(device),
        f"{hardware.name}, {format_bytes(hardware.memory_bytes)}",
        {"name": hardware.name, "memory_bytes": hardware.memory_bytes},
    )
    link = hardware.link_bytes_per_s
    yield Finding("devices", f"{device} link", f"{link / 1e9:.1f} GB/s each way, measured with pinned copies", link)


def _limits() -> Iterator[Finding]:
    locked = _locked_limit_bytes()
    shown = "no limit" if locked is None else format_bytes(locked)
    yield Finding("limits", "locked memory (ulimit -l)", shown, locked)
    if torch.accelerator.is_available():
        try:
            torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
            text, status = f"{format_bytes(_PINNED_BYTES)} pinned", "ok"
        except RuntimeError as error:
            text, status = f"{format_bytes(_PINNED_BYTES)} could not be pinned: {str(error).splitlines()[0]}", "problem"
        yield Finding("limits", "pinning", text, status == "ok", status)  # type: ignore[arg-type]
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    yield Finding("limits", f"free disk in {folder}", format_bytes(free), free)


def _conflicts(job: Job | None) -> Iterator[Finding]:
    found = [*_variables(), *_hooks(), *_libraries()]
    if job is not None:
        found += _model(job)
    yield from found
    if not any(finding.status == "problem" for finding in found):
        of = "in this process" if job is None else "in this process and on the model"
        yield Finding("conflicts", "checkpointing", f"no other checkpointing {of}", True)


def _variables() -> Iterator[Finding]:
    for name, meaning in _VARIABLES.items():
        if os.environ.get(name, "0") not in ("0", ""):
            yield Finding("conflicts", name, f"{os.environ[name]}: {meaning}", os.environ[name], "note")


def _hooks() -> Iterator[Finding]:
    """Hooks on saved tensors that are on for everything, as activation offloading of others leaves them.

    torch refuses to switch such hooks off while there are any, which is how it is asked here.
    """
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("lowtide doctor is looking"):
            pass
    except RuntimeError:
        yield Finding(
            "conflicts",
            "saved-tensor hooks",
            "someone moves or packs saved tensors already (an offloading context that was entered): leave it first",
            True,
            "problem",
        )


def _libraries() -> Iterator[Finding]:
    checkpointing = getattr(sys.modules.get("deepspeed"), "checkpointing", None)
    if checkpointing is not None and checkpointing.is_configured():
        text = "activation checkpointing is configured: regions run through deepspeed.checkpointing are not seen"
        yield Finding("conflicts", "deepspeed", text, True, "note")


def _model(job: Job) -> Iterator[Finding]:
    try:
        lowtide.apply(job.model, lowtide.Plan()).remove()  # a plan that asks for nothing: refused where any would be
    except lowtide.LowtideError as error:
        yield Finding("conflicts", "model", str(error), None, "problem")


def _host_memory_bytes() -> int:
    """The memory this process may use: the machine's, or its control group's if that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def _locked_limit_bytes() -> int | None:
    """How much memory a process may lock; None where nothing limits it, or nobody knows."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
