"""Op times from `tracing.op_times`: they sum to the measured step, on one time line or two.

Ops of a recording are matched to a profiler's trace, with their seconds on the host and on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn

import lowtide
from lowtide.graph.time_lines import device_starts
from lowtide.tracing.devices import read_allocator
from lowtide.tracing.op_times import PlainTimes, ProfiledStep, calibrated, fit_to_total, matched, profiled, set_seconds
from lowtide.tracing.trace_records import RawOp

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_what_is_missing_is_shared_out(device: torch.device) -> None:
    assert fit_to_total([1.0, 3.0], 6.0, device=device) == pytest.approx([2.0, 4.0])


def test_what_watching_adds_is_taken_off_alike() -> None:
    assert fit_to_total([1.0, 5.0], 4.0, device=GPU) == pytest.approx([0.0, 4.0])


def test_a_slow_run_is_scaled() -> None:
    assert fit_to_total([1.0, 3.0], 2.0, device=CPU) == pytest.approx([0.5, 1.5])


def test_no_ops_take_no_time() -> None:
    assert fit_to_total([], 1.0, device=CPU) == []


def test_without_a_profile_an_op_takes_its_median_over_recordings() -> None:
    alike = [
        [RawOp("aten.add.Tensor", -1, (), (), (), (), 0, 0, None, -1, seconds=each) for each in run]
        for run in ([9.0, 1.0], [2.0, 3.0], [1.0, 2.0])
    ]
    assert not set_seconds(alike[1], alike, [], 1, PlainTimes(2.0, 2.0, 2.0, 2.0), CPU)
    assert [op.seconds for op in alike[1]] == [2.0, 2.0]


def times_of(*, host_s: float, step_s: float) -> PlainTimes:
    return PlainTimes(step_s / 2, step_s / 2, host_s / 2, host_s / 2)


def simulated_s(host: list[float], device: list[float], is_sync: list[bool]) -> float:
    starts = device_starts(np.array([*host, 0.0]), np.array([*device, 0.0]), np.array([*is_sync, False]))
    return float(starts[-1])


def test_a_profiled_host_is_scaled_to_what_it_takes_without() -> None:
    profiled = ProfiledStep([2.0, 4.0, 6.0, 6.0], [1.0] * 4, [1] * 4, [False] * 4)
    host, device = calibrated(profiled, 2, PlainTimes(4.0, 4.0, 3.0, 4.0))
    assert np.array(host) / host[0] == pytest.approx([1.0, 2.0, 2.0, 2.0])  # forward and backward each by their own
    assert device == [1.0] * 4
    assert simulated_s(host, device, profiled.is_sync) == pytest.approx(8.0)


def test_what_the_device_needs_between_kernels_is_part_of_them() -> None:
    profiled = ProfiledStep([0.1] * 4, [1.0, 0.0, 2.0, 3.0], [1, 0, 2, 1], [False] * 4)
    host, device = calibrated(profiled, 2, times_of(host_s=0.2, step_s=8.05))
    assert sum(host) == pytest.approx(0.2)
    assert device == pytest.approx([1.5, 0.0, 3.0, 3.5])
    assert simulated_s(host, device, profiled.is_sync) == pytest.approx(8.05)


def test_a_host_that_had_to_wait_is_not_made_slower() -> None:
    profiled = ProfiledStep([0.1] * 4, [1.0] * 4, [1] * 4, [False] * 4)
    host, _ = calibrated(profiled, 2, times_of(host_s=4.0, step_s=4.1))
    assert host == pytest.approx([0.1] * 4)


def test_a_step_that_synchronises_is_fitted_too() -> None:
    profiled = ProfiledStep([2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 0.5, 0.5], [1] * 4, [False, True, False, False])
    host, device = calibrated(profiled, 2, PlainTimes(4.0, 2.0, 4.0, 2.0))
    assert simulated_s(host, device, profiled.is_sync) == pytest.approx(6.0)
    assert sum(host[:2]) < 4.0  # it waited for the second op


def test_no_ops_no_lines() -> None:
    assert calibrated(ProfiledStep([], [], [], []), 0, times_of(host_s=0.0, step_s=0.0)) == ([], [])


NAMES = ("aten.t.default", "aten.addmm.default", "aten.add.Tensor", "aten._local_scalar_dense.default")


class Trace:
    """Events as the profiler writes them, in microseconds."""

    def __init__(self, end: float = 100.0) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
        self.span("lowtide::step", "user_annotation", 0.0, end)

    def span(self, name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: Any) -> None:
        self.events.append({"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args})

    def launch(self, ts: float, number: int, kernel_us: float, *, dur: float = 1.0, tid: int = 1) -> None:
        self.span("cudaLaunchKernel", "cuda_runtime", ts, dur, tid, correlation=number)
        self.span("some_kernel", "kernel", ts + 50, kernel_us, 7, correlation=number)


def step() -> Trace:
    trace = Trace()
    trace.span("aten::linear", "cpu_op", 4.0, 16.0)  # what is made of other ops is in no graph
    trace.span("aten::t", "cpu_op", 5.0, 5.0)
    trace.span("aten::transpose", "cpu_op", 6.0, 3.0)
    trace.span("aten::addmm", "cpu_op", 11.0, 9.0)
    trace.launch(12.0, 1, 30.0)
    trace.launch(14.0, 2, 10.0)
    trace.span("aten::add_", "cpu_op", 40.0, 10.0, tid=2)  # by autograd, in place as nobody else holds it
    trace.launch(42.0, 3, 5.0, tid=2)
    trace.span("aten::_local_scalar_dense", "cpu_op", 60.0, 30.0)
    trace.span("cudaStreamSynchronize", "cuda_runtime", 61.0, 25.0, 1, correlation=4)
    return trace


def test_each_op_has_the_time_since_the_one_before_it() -> None:
    found = matched(step().events, NAMES)
    assert found is not None
    assert found.host_s == pytest.approx([10e-6, 10e-6, 30e-6, (50 - 25) * 1e-6])  # to the end; and without the wait
    assert found.device_s == pytest.approx([0.0, 40e-6, 5e-6, 0.0])
    assert found.num_kernels == [0, 2, 1, 0]
    assert found.is_sync == [False, False, False, True]


def test_a_launch_that_waits_for_room_in_the_queue_is_no_work() -> None:
    trace = step()
    trace.launch(43.0, 5, 1.0, dur=21.0)
    found = matched(trace.events, NAMES)
    assert found is not None and found.host_s[2] == pytest.approx(10e-6) and not found.is_sync[2]


def test_what_runs_inside_an_op_is_not_taken_for_the_next() -> None:
    trace = Trace(50.0)
    trace.span("aten::add", "cpu_op", 0.0, 10.0)
    trace.span("aten::add", "cpu_op", 2.0, 3.0)  # inside
    trace.span("aten::add", "cpu_op", 20.0, 10.0)
    found = matched(trace.events, ("aten.add.Tensor", "aten.add.Tensor"))
    assert found is not None and found.host_s == pytest.approx([10e-6, 40e-6])


class _Reshaping(nn.Module):
    """Ops that a profile names otherwise than a recording: views of strided tensors, and casts by autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(4, 4, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            rows = self.linear(x.reshape(2, 4, -1).transpose(1, 2)).transpose(1, 2)
            x = self.convolution(rows.reshape(x.shape)).flatten(2).transpose(1, 2).transpose(1, 2).reshape(x.shape)
        return x


@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_real_profile_is_matched(is_autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    model, x = _Reshaping(), torch.randn(2, 4, 3, 3)

    def loss_fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            return model(x).float().square().mean()

    names = [op.name for op in lowtide.trace(model, loss_fn, x, mode="real").ops]
    events = profiled(lambda: loss_fn(x).backward(), torch.device("cpu"))
    found = matched(events, names)
    assert found is not None
    views = {"aten.t.default", "aten.view.default", "aten.transpose.int"}
    assert all(seconds > 0 for seconds, name in zip(found.host_s, names, strict=True) if name not in views)
    assert found.host_s[names.index("aten.view.default")] > 0


def test_an_op_more_or_less_is_passed_over() -> None:
    trace, names = Trace(1300.0), []
    for number in range(40):
        for name in ("mul", "add", "sum"):
            if (number, name) != (20, "add"):
                trace.span(f"aten::{name}", "cpu_op", 10.0 * len(names), 5.0)
            names.append(f"aten.{name}.default")
    names.insert(30, "aten.add.Tensor")
    found = matched(trace.events, names)
    assert found is not None and len(found.host_s) == 121
    assert found.host_s[30] == 0.0 and sum(found.host_s) == pytest.approx(1300e-6)


@pytest.mark.parametrize("names", [("aten.mul.Tensor",) * 8, ("aten.t.default", "aten.mm.default") * 4])
def test_another_step_is_not_matched(names: tuple[str, ...]) -> None:
    assert matched(step().events, names) is None
    assert matched([], names) is None


@pytest.mark.gpu
def test_a_traced_step_has_two_lines_that_come_to_what_it_takes() -> None:
    job = zoo.make("gpt_dropout", "cuda")
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch)
    assert graph.has_host_line and "limited by" in str(graph)
    assert not any("one time line" in note for note in graph.notes)
    matmuls = [op for op in graph.ops if op.name.startswith(("aten.mm", "aten.addmm", "aten.bmm"))]
    assert matmuls and all(op.seconds > 0 and op.host_s > 0 for op in matmuls)
    assert graph.lines.step_s <= 1.2 * graph.step_s  # which is that of single steps, and includes their beginning


@pytest.mark.gpu
def test_an_op_that_synchronises_is_seen() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).cuda()

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.sum() * (1.0 + 0.0 * y.detach().sum().item())

    graph = lowtide.trace(model, loss_fn, torch.randn(4, 8, device="cuda"))
    assert [op.name for op in graph.ops if "sync" in op.flags] == ["aten._local_scalar_dense.default"]


@pytest.mark.gpu
def test_the_allocator_is_read() -> None:
    torch.cuda.init()
    before = read_allocator(GPU).now
    kept = torch.empty(1 << 20, device=GPU)
    del kept
    now, peak, requested_peak = read_allocator(GPU)
    assert now == before and peak >= before + (4 << 20), "memory_stats_as_nested_dict has another form"
    assert 4 << 20 <= requested_peak <= peak
