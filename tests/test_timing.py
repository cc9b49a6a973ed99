"""Op times that add up."""

from __future__ import annotations

import pytest
import torch

from lowtide.tracing import timing
from lowtide.tracing.timing import fit_to_total, host_costs, medians

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


def test_what_the_host_costs() -> None:
    state = torch.get_rng_state()
    costs = host_costs(CPU, host_s=0.1, step_s=1.0)
    assert 0.0 <= costs.dispatch_s < 1.0 and 0.0 <= costs.region_s < 1.0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_twentieth_of_it_counts_where_the_host_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(device: torch.device, host_s: float) -> timing.HostCosts:
        seconds = iter([[1.0, 3.0], [1.0, 2.0, 8.0]])
        monkeypatch.setattr(timing, "_seconds_of", lambda *calls: next(seconds))
        return host_costs(device, host_s=host_s, step_s=1.0)

    dispatch_s, region_s, spare_s = costs(CPU, 0.1)
    assert region_s == timing._REGION_IN_A_MODEL * (8.0 - 2.0 - 1.0)
    assert spare_s == timing._SUBSTITUTED * dispatch_s
    assert costs(GPU, 0.9) == (dispatch_s, region_s, spare_s)
    assert costs(GPU, 0.1) == pytest.approx((dispatch_s / 20, region_s / 20, spare_s / 20))
