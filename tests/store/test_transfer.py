"""Copies between device and host, on a simulated device that checks the order of all accesses."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from fakedevice import Device
from lowtide import ActivationStore
from lowtide.store.transfer import GRANULE_BYTES, AcceleratorMover, PinnedPool
from sweeps import sweep

CPU = torch.device("cpu")


def mover_on(device: Device, monkeypatch: pytest.MonkeyPatch) -> AcceleratorMover:
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_device_module", lambda _: device)
        return AcceleratorMover(CPU, PinnedPool(1024 * GRANULE_BYTES, pin=False))


def store_on(fake: Device, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ActivationStore:
    store = ActivationStore(host=1024 * GRANULE_BYTES, **options)
    store._tiers._movers[CPU] = mover_on(fake, monkeypatch)
    return store


def made(device: Device, choice: random.Random) -> Tensor:
    """A value that the current stream has just written; often where another was before."""
    value = torch.full((choice.choice((1000, 20_000, 50_000)),), choice.random())
    device.used(value, is_write=True)
    return value


def step(device: Device, store: ActivationStore, choice: random.Random, num_values: int = 12) -> None:
    """A forward that puts values, and a backward that takes them, mostly the last one first."""
    expected = {}
    for key in range(num_values):
        value = made(device, choice)
        expected[key] = value.clone()
        store.put(key, value)
        if choice.random() < 0.2:
            assert torch.equal(store.get(key), value)  # type: ignore[arg-type]
        del value
    store.fetch_before(store.end_of_forward())
    while expected:
        key = max(expected) if choice.random() < 0.8 else choice.choice(list(expected))
        found = store.take(key)
        assert isinstance(found, Tensor) and torch.equal(found, expected.pop(key))
        device.used(found, is_write=False)
        del found
        made(device, choice)  # a gradient, and gone again
    assert len(store) == 0


@pytest.mark.parametrize("seed", sweep(range(4), keep=1))
@pytest.mark.parametrize(
    "options",
    [{}, {"in_flight": 0}, {"in_flight": 300_000}, {"device": 400_000, "in_flight": 0}, {"codec": "lossless"}],
    ids=str,
)
def test_no_copy_races_with_anything(options: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = random.Random(seed)
    device = Device(is_over=lambda _: choice.random() < 0.3)
    store = store_on(device, monkeypatch, **options)
    for _ in range(3):
        step(device, store, choice)
    assert device.num_ordered > 50, "little was used twice"


@pytest.mark.parametrize("is_over", [True, False])
def test_events_are_made_in_the_first_step_only(is_over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(is_over=lambda _: is_over)
    store = store_on(device, monkeypatch)
    step(device, store, random.Random(0))
    num_events = device.num_events
    for _ in range(3):
        step(device, store, random.Random(0))
    assert device.num_events == num_events


def test_an_event_is_not_used_again_while_someone_may_ask_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(is_over=lambda _: False)
    mover = mover_on(device, monkeypatch)

    def copy_out() -> Any:
        return mover.to_host((torch.ones(1000),), None)

    first = copy_out()
    event = first._done._event
    first.release()
    del first
    second = copy_out()
    assert second._done._event is not event, "the source is still held until it is over"
    mover.settle(0)
    third = copy_out()
    assert third._done._event is event
    arriving = third.fetch()
    fourth = copy_out()
    assert len({id(event) for event in (*(each._done._event for each in (second, third, fourth)), arriving._done)}) == 4
    for _ in range(2):  # another view of it may be asked for, on another stream
        before = device.num_waits
        arriving.wait()
        assert device.num_waits == before + 1


@pytest.mark.parametrize("is_in_a_cycle", [False, True])
def test_memory_is_not_given_back_before_a_copy_in_that_nobody_wants(
    is_in_a_cycle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector ends what is in a cycle in an order of its own."""
    device = Device(is_over=lambda _: False)
    mover = mover_on(device, monkeypatch)
    copy: Any = mover.to_host((torch.ones(1000),), None)
    holder: list[Any] = [copy.fetch()]
    if is_in_a_cycle:
        holder.append(holder)
    del holder
    gc.collect()
    assert device.compute.waited_for[mover.stream_in.number] == mover.stream_in.position


def test_a_copy_known_to_be_over_holds_no_event_and_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(is_over=lambda _: False)
    mover = mover_on(device, monkeypatch)
    value = torch.arange(1000.0)
    copy: Any = mover.to_host((value,), None)
    waits = []
    for is_over in (False, True):
        device.is_over = lambda _, is_over=is_over: is_over
        mover.settle(4000)
        before = device.num_waits
        arriving = copy.fetch()
        waits.append(device.num_waits - before)
        assert torch.equal(arriving.wait()[0], value) and torch.equal(copy.on_host()[0], value)
    assert waits == [2, 1] and mover.in_flight_bytes == 0


def test_a_mover_is_gone_with_its_last_user_even_while_copies_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = mover_on(Device(is_over=lambda _: False), monkeypatch)
    copies = [mover.to_host((torch.ones(1000),), None) for _ in range(3)]
    arriving: Any = copies[0].fetch()  # type: ignore[union-attr]
    reference = weakref.ref(mover)
    gc.disable()
    try:
        del mover, copies, arriving
        assert reference() is None, "a cycle: memory would wait for the garbage collector"
    finally:
        gc.enable()


def test_the_stream_out_waits_for_copies_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    mover = mover_on(device, monkeypatch)

    def waits_of_a_copy_out() -> int:
        before = device.num_waits
        copies.append(mover.to_host((torch.ones(1000),), None))
        return device.num_waits - before

    copies: list[Any] = []
    assert [waits_of_a_copy_out(), waits_of_a_copy_out()] == [1, 1]
    copies[0].fetch().wait()
    assert [waits_of_a_copy_out(), waits_of_a_copy_out()] == [2, 1]


def test_host_memory_is_written_again_only_after_the_copy_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(is_over=lambda _: False)
    mover = mover_on(device, monkeypatch)
    early, ready = torch.ones(1000), mover.now()
    copy: Any = mover.to_host((torch.ones(1000),), None)
    arriving, extents = copy.fetch(), copy._extents
    copy.release()
    other: Any = mover.to_host((early,), ready)  # which alone would not tell of the copy in
    assert other._extents == extents
    arriving.wait()


def test_memory_of_what_was_fetched_in_vain_is_written_again_only_after_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(is_over=lambda _: False)
    mover = mover_on(device, monkeypatch)
    copy: Any = mover.to_host((torch.ones(1000),), None)
    arriving = copy.fetch()
    (memory,) = arriving._parts
    with pytest.raises(AssertionError, match="a race"):
        device.used(memory, is_write=True)
    del arriving
    device.used(memory, is_write=True)


def test_waits_are_timed_when_there_is_something_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    mover = mover_on(device, monkeypatch)
    copy: Any = mover.to_host((torch.ones(1000),), None)
    copy.fetch().wait()
    assert device.num_timers == 0 and mover.waited_s() == 0
    device.is_over = lambda event: event.tells_time
    for _ in range(500):
        copy.fetch().wait()
    assert device.num_timers < 200, "made for each wait"
    assert mover.waited_s() == pytest.approx(0.5)


def test_a_copy_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    store = store_on(device, monkeypatch)
    mover: Any = store._tiers._movers[CPU]
    kept = torch.arange(1000.0)
    store.put("kept", kept)
    before = store.stats()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("the copy failed")

    with monkeypatch.context() as patched:
        patched.setattr(device, "used", fails)
        with pytest.raises(RuntimeError, match="the copy failed"):
            store.put("other", torch.ones(50_000))
    after = store.stats()
    assert mover.pool._free_bytes == mover.pool.locked_bytes - after.held_bytes
    assert (after.held_bytes, after.in_flight_bytes, after.num_held) == (before.held_bytes, 0, 1)
    assert torch.equal(store.take("kept"), kept)  # type: ignore[arg-type]
    step(device, store, random.Random(0))
