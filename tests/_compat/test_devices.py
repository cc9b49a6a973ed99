"""Canaries for `_compat/devices.py`: default devices, generators and the allocator's counters can be read."""

from __future__ import annotations

import pytest
import torch

from lowtide._compat import devices


def test_the_default_device_is_read() -> None:
    assert devices.default_device() is None
    with torch.device("meta"):
        assert devices.default_device() == torch.device("meta"), "`with torch.device()` is no DeviceContext any more"


def test_generators_are_identified() -> None:
    one, other = torch.Generator(), torch.Generator()
    assert devices.generator_id(one) == devices.generator_id(one) != devices.generator_id(other), "_cdata is no id"
    assert devices.allocator_meter(torch.device("cpu")) is None


@pytest.mark.gpu
def test_the_allocator_is_read() -> None:
    device = torch.device("cuda", 0)
    assert devices.accelerator() is not None
    assert isinstance(devices.default_generator("cuda", 0), torch.Generator)
    read = devices.allocator_meter(device)
    assert read is not None
    before, _ = read()
    kept = torch.empty(1 << 20, device=device)
    del kept
    now, peak = read()
    assert now == before and peak >= before + (4 << 20), "_cuda_memoryStats has another form"


@pytest.mark.gpu
def test_ops_that_synchronise_are_listed() -> None:
    x = torch.ones(2, device="cuda")
    with devices.SynchronizingOps(lambda: "here") as mode:
        (x + x).sum().item()
    assert [where for _, where in mode.found] == ["here"], "the error of sync debug mode has another text"
