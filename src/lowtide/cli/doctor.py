"""`lowtide doctor`: check versions, devices, the link to host memory, limits, and conflicts with other libraries.

`examine` returns a list of findings. A finding is a "problem" if lowtide cannot work, such as a torch that is too old
or another library's saved-tensor hooks, and a "note" if it changes what can be expected. Each device is checked by
tracing a small step on it. With a script, its model is checked too.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

import lowtide
from lowtide.cli.output import Display
from lowtide.cli.script import Job
from lowtide.store import host_bytes
from lowtide.units import format_bytes

_OLDEST_TORCH = (2, 11)
_OTHERS = ("triton", "transformers", "matplotlib", "deepspeed", "fairscale", "trl", "accelerate", "lightning")
_PINNED_BYTES = 64 << 20
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}

# Environment variables that change memory or timing, and their effect on plans.
_VARIABLES = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "torch's allocator is off: peaks and times are not those of a training run",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the host: copies cannot run beside compute",
    "PYTORCH_CUDA_ALLOC_CONF": "allocator settings; lowtide counts allocated bytes, whatever they are",
    "PYTORCH_ALLOC_CONF": "allocator settings; lowtide counts allocated bytes, whatever they are",
}


@dataclass(frozen=True)
class Finding:
    """The result of one check. A "problem" keeps lowtide from working, a "note" does not; `value` is for JSON."""

    group: str
    name: str
    text: str
    value: Any = None
    status: Literal["ok", "note", "problem"] = "ok"


def examine(job: Job | None, stage: Callable[[str], None]) -> list[Finding]:
    """Run all checks; with a job, also of its model."""
    findings: list[Finding] = []
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("versions", _versions),
        ("devices and their links", _devices),
        ("limits", _limits),
        ("other checkpointing", lambda: _conflicts(job)),
    )
    for name, check in checks:
        stage(f"checking {name}")
        findings += check()
    return findings


def display(found: list[Finding]) -> Display:
    """Return a table and data of the findings of `lowtide doctor`."""
    table = Table(box=None, show_header=False, pad_edge=False)
    group = ""
    for finding in found:
        if finding.group != group:
            table.add_row(Text(finding.group, style="bold"))
            group = finding.group
        mark = {"ok": "", "note": "note: ", "problem": "problem: "}[finding.status]
        table.add_row(Text(f"  {finding.name}"), Text(mark, _STYLES[finding.status]) + Text(finding.text))
    problems = sum(finding.status == "problem" for finding in found)
    verdict = Text(f"{problems} problem{'s' * (problems != 1)} found", style=_STYLES["problem" if problems else "ok"])
    data = {"num_problems": problems, "findings": [asdict(finding) for finding in found]}
    return Group(table, verdict), data


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
    memory = host_bytes()
    yield Finding("devices", "cpu", f"{os.cpu_count()} cores, {format_bytes(memory)}", {"memory_bytes": memory})
    if not torch.accelerator.is_available():
        yield Finding(
            "devices",
            "accelerator",
            "none, so offload cannot be tried here. To plan for a device of another machine: --device H100",
            status="note",
        )
        return
    kind = torch.accelerator.current_accelerator()
    for index in range(torch.accelerator.device_count()):
        yield from _accelerator(torch.device(str(kind), index))


def _accelerator(device: torch.device) -> Iterator[Finding]:
    """Trace a small step on a device, which also measures its link to host memory."""
    try:
        model = nn.Linear(64, 64).to(device)
        graph = lowtide.trace(model, lambda x: model(x).sum(), torch.randn(8, 64, device=device), mode="real")
    except Exception as error:  # any failure is the result of this check
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
    text = "no limit" if locked is None else format_bytes(locked)
    yield Finding("limits", "locked memory (ulimit -l)", text, locked)
    if torch.accelerator.is_available():
        try:
            torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
            yield Finding("limits", "pinning", f"{format_bytes(_PINNED_BYTES)} pinned", True)
        except RuntimeError as error:
            text = f"{format_bytes(_PINNED_BYTES)} could not be pinned: {str(error).splitlines()[0]}"
            yield Finding("limits", "pinning", text, False, "problem")
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    yield Finding("limits", f"free disk in {folder}", format_bytes(free), free)


def _conflicts(job: Job | None) -> Iterator[Finding]:
    conflicts = [*_variables(), *_hooks(), *_libraries()]
    if job is not None:
        conflicts += _model(job)
    yield from conflicts
    if not any(finding.status == "problem" for finding in conflicts):
        of = "in this process" if job is None else "in this process and on the model"
        yield Finding("conflicts", "checkpointing", f"no other checkpointing {of}", True)


def _variables() -> Iterator[Finding]:
    for name, meaning in _VARIABLES.items():
        if os.environ.get(name, "0") not in ("0", ""):
            yield Finding("conflicts", name, f"{os.environ[name]}: {meaning}", os.environ[name], "note")


def _hooks() -> Iterator[Finding]:
    """Find saved-tensor hooks that are active outside of any region, as from another library's offloading.

    torch has no public query for them, but refuses to disable hooks while some are active.
    """
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("lowtide doctor is checking"):
            pass
    except RuntimeError:
        yield Finding(
            "conflicts",
            "saved-tensor hooks",
            "other saved-tensor hooks are active (an offloading context was entered and not left): leave it first",
            True,
            "problem",
        )


def _libraries() -> Iterator[Finding]:
    checkpointing = getattr(sys.modules.get("deepspeed"), "checkpointing", None)
    if checkpointing is not None and checkpointing.is_configured():
        text = "activation checkpointing is configured: regions run through deepspeed.checkpointing are not recorded"
        yield Finding("conflicts", "deepspeed", text, True, "note")


def _model(job: Job) -> Iterator[Finding]:
    try:
        lowtide.apply(job.model, lowtide.Plan()).remove()  # an empty plan; raises if no plan could be applied
    except lowtide.LowtideError as error:
        yield Finding("conflicts", "model", str(error), None, "problem")


def _locked_limit_bytes() -> int | None:
    """Return how much memory a process may lock; None if there is no limit, or it is unknown."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
