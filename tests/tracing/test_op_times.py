"""Op times from `tracing.op_times`: they sum to the measured step, on one time line or two."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowtide.graph.time_lines import device_starts
from lowtide.tracing.op_times import PlainTimes, ProfiledStep, calibrated, fit_to_total, medians

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


def test_medians_go_op_by_op() -> None:
    assert medians([[9.0, 1.0], [2.0, 3.0], [1.0, 2.0]]) == [2.0, 2.0]


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
