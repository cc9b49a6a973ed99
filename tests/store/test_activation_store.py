"""`ActivationStore`: values come back unchanged, and the counted bytes are right after every call."""

from __future__ import annotations

import copy
import gc
import pickle
import stat
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtide
from lowtide import ActivationStore, StoreError
from lowtide._compat.profiler import cpu_allocation_totals
from lowtide.errors import CapacityError, ChangedInPlaceError
from lowtide.store import Missing
from lowtide.store.transfer import GRANULE_BYTES, PinnedPool, round_up


def floats(num_bytes: int) -> Tensor:
    return torch.randn(num_bytes // 4)


def check_books(store: ActivationStore) -> None:
    stats = store.stats()
    assert stats.held_bytes == sum(entry.nbytes for entry in stats.entries) == sum(stats.held_bytes_by_tier.values())
    assert stats.num_held == len(store) == len(list(store)) == len(stats.entries)
    for tier, held in stats.held_bytes_by_tier.items():
        assert 0 <= held <= stats.peak_bytes_by_tier[tier] <= stats.budget_bytes_by_tier[tier]
    tiers: dict[str, Any] = store._tiers._tiers
    assert {name: tier.used_bytes for name, tier in tiers.items()} == dict(stats.held_bytes_by_tier)


# Keys


def test_put_get_take_has_remove_clear() -> None:
    store = ActivationStore()
    a, b = floats(400), floats(800)
    handle = store.put("a", a)
    store.put(("b", 1), b)
    assert list(store) == ["a", ("b", 1)] and len(store) == 2
    assert store.has("a") and "a" in store and "c" not in store
    assert torch.equal(store.get("a"), a) and torch.equal(handle.get(), a)
    assert store.stats().held_bytes == 1200
    assert torch.equal(store.take(("b", 1)), b)
    assert store.stats().held_bytes == 400
    store.remove("a")
    assert len(store) == 0 and store.stats().held_bytes == 0
    for missing in (store.get, store.take, store.remove):
        with pytest.raises(KeyError, match="nothing is stored under 'a'"):
            missing("a")
    store.put("x", a)
    store.clear()
    check_books(store)
    assert store.stats().num_created == 3


def test_putting_again_replaces_and_renews() -> None:
    store = ActivationStore(device=1000)
    store.put("a", floats(400))
    store.put("b", floats(400))
    renewed = floats(600)
    store.put("a", renewed)
    assert list(store) == ["b", "a"]
    assert torch.equal(store.get("a"), renewed)
    assert store.stats().held_bytes == 1000
    check_books(store)


def test_a_value_larger_than_every_tier_changes_nothing() -> None:
    store = ActivationStore(device=1000, host=500)
    kept = floats(400)
    store.put("a", kept)
    with pytest.raises(CapacityError, match=r"1\.2 KiB is larger than every tier \(device 1000 B, host 500 B\)"):
        store.put("a", floats(1200))
    assert torch.equal(store.get("a"), kept)
    check_books(store)


def test_replacing_without_room_keeps_the_old() -> None:
    store = ActivationStore(device=1000, on_full="error")
    old = floats(400)
    store.put("a", old)
    store.put("b", floats(600))
    with pytest.raises(CapacityError):
        store.put("a", floats(404))
    assert torch.equal(store.get("a"), old)
    check_books(store)


def test_only_tensors() -> None:
    with pytest.raises(TypeError, match="not list"):
        ActivationStore().put("a", [1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"on_full": "spil"}, {"order": "newest"}, {"codec": "zip"}, {"device": 0}, {"host": "1 apple"}], ids=str
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ActivationStore(**options)


# Tiers


def test_spilling_moves_the_oldest_down_as_many_as_it_takes(tmp_path: Path) -> None:
    store = ActivationStore(device=1000, host=1000, disk=10_000, folder=tmp_path)
    values = {i: floats(400) for i in range(6)}
    for key, value in values.items():
        store.put(key, value)
        check_books(store)
    tiers = {entry.key: entry.tier for entry in store.stats().entries}
    assert tiers == {0: "disk", 1: "disk", 2: "host", 3: "host", 4: "device", 5: "device"}
    store.put("large", big := floats(1000))  # needs two to go, which need two more to go
    tiers = {entry.key: entry.tier for entry in store.stats().entries}
    assert tiers == {0: "disk", 1: "disk", 2: "disk", 3: "disk", 4: "host", 5: "host", "large": "device"}
    for key, value in values.items():
        assert torch.equal(store.get(key), value)
    assert torch.equal(store.take("large"), big)
    assert store.stats().num_held_by_tier == {"device": 0, "host": 2, "disk": 4}
    assert store.stats().num_spilled == 10
    store.close()


def test_a_value_too_large_for_the_first_tier_goes_below() -> None:
    store = ActivationStore(device=100, host=1000)
    store.put("a", value := floats(400))
    assert store.stats().held_bytes_by_tier == {"device": 0, "host": 400}
    assert torch.equal(store.get("a"), value)


def test_eviction_drops_and_says_what_is_missing() -> None:
    store = ActivationStore(device=1000, on_full="evict")
    for key in range(3):
        store.put(key, floats(400))
    missing = store.get(0)
    assert isinstance(missing, Missing) and not missing
    assert missing == Missing(0, torch.Size([100]), torch.float32, 400)
    assert not store.has(0) and store.stats().num_evicted == 1
    store.put(0, floats(400))
    assert isinstance(store.get(0), Tensor)
    check_books(store)


def test_what_is_not_evictable_stays() -> None:
    store = ActivationStore(device=1000, on_full="evict")
    store.put("input", value := floats(400), evictable=False)
    for key in range(5):
        store.put(key, floats(400))
    assert list(store) == ["input", 4] and torch.equal(store.get("input"), value)
    with pytest.raises(CapacityError, match="no room for 800 B in the device tier"):
        store.put("large", floats(800))
    assert list(store) == ["input", 4], "nothing is evicted in vain"
    store.put("alias", value)
    store.remove("input")
    for key in range(2):
        store.put(key, floats(400))
    assert list(store) == [0, 1], "an alias that may be evicted is, once the other is gone"
    store.put(0, floats(400), evictable=False)  # put again under its key
    store.put(0, floats(900))
    assert list(store) == [0]
    check_books(store)


def test_what_is_not_evictable_is_spilled() -> None:
    store = ActivationStore(device=1000, host=1000)
    for key in range(3):
        store.put(key, floats(400), evictable=False)
    assert store.stats().num_held_by_tier == {"device": 2, "host": 1}


def test_absent_keys() -> None:
    store = ActivationStore(device=1000, on_full="evict")
    for key in range(3):
        store.put(key, floats(400))
    for absent in (store.get, store.take, store.remove):
        with pytest.raises(KeyError, match="nothing is stored under 'never'; there is 1, 2"):
            absent("never")
    assert isinstance(store.take(0), Missing)
    with pytest.raises(KeyError):
        store.take(0)
    store.put(1, floats(400))
    assert store.stats().num_created == 4
    store.clear()
    assert store.stats().num_created == 4 and store.stats().num_evicted == 1 and len(store) == 0


def test_a_tier_is_full_by_its_own_budget(tmp_path: Path) -> None:
    with ActivationStore(device=400, disk="1MiB", folder=tmp_path) as store:
        store.put(0, floats(400))
        assert store.stats().utilization_by_tier["device"] == 1.0
        store.put(1, floats(400))
        stats = store.stats()
        assert stats.utilization_by_tier == {"device": 1.0, "disk": 400 / 2**20}
        assert stats.num_held_by_tier == {"device": 1, "disk": 1}
        assert "100%" in str(stats)


def test_a_store_prints_its_options_and_is_not_copied() -> None:
    store = ActivationStore(device="1MiB", on_full="evict", codec="float16")
    assert repr(store) == "ActivationStore(device='1MiB', on_full='evict', codec='float16')"
    assert repr(ActivationStore()) == "ActivationStore()"
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled: .* Make another with these options"):
            copied(store)
    with pytest.raises(KeyError, match="the store is empty"):
        store.get("h")


def test_error_when_full() -> None:
    store = ActivationStore(device=1000, host=1000, on_full="error")
    store.put("a", floats(800))
    with pytest.raises(CapacityError, match="no room for 400 B in the device tier"):
        store.put("b", floats(400))
    check_books(store)


def test_costs_decide_who_goes() -> None:
    store = ActivationStore(device=1000, on_full="evict")
    store.put("dear", floats(400), cost=100.0)
    store.put("cheap", floats(400), cost=1.0)
    store.put("new", floats(400), cost=50.0)
    assert store.has("dear") and not store.has("cheap")
    oldest = ActivationStore(device=1000, on_full="evict", order="oldest")
    oldest.put("dear", floats(400), cost=100.0)
    oldest.put("cheap", floats(400), cost=1.0)
    oldest.put("new", floats(400), cost=50.0)
    assert not oldest.has("dear")


def test_staleness_counts_with_cost() -> None:
    store = ActivationStore(device=1000, on_full="evict", order="cost")
    store.put("stale", floats(400), cost=10.0)
    store.put("used", floats(400), cost=10.0)
    for _ in range(10):
        store.get("used")
    store.put("new", floats(400), cost=10.0)
    assert store.has("used") and not store.has("stale")


# What is held


def test_views_of_one_storage_are_held_once() -> None:
    base = torch.randn(10, 20)
    for store in (ActivationStore(), ActivationStore(host="1MiB")):
        store.put("base", base)
        store.put("transposed", base.t())
        store.put("half", base[5:])
        assert store.stats().held_bytes == 800
        assert torch.equal(store.get("transposed"), base.t()) and store.get("transposed").stride() == base.t().stride()
        assert torch.equal(store.take("base"), base)
        assert store.stats().held_bytes == 800
        assert torch.equal(store.take("half"), base[5:])
        assert torch.equal(store.take("transposed"), base.t())
        assert store.stats().held_bytes == 0
        check_books(store)


@pytest.mark.parametrize("takes_at_once", [True, False])
def test_a_value_with_several_readers_comes_back_once(takes_at_once: bool) -> None:
    """The query, key and value projections of attention all save their one input, and let go of it one by one."""
    with lowtide.ActivationStore(host="1MiB") as store:
        value = torch.randn(64, 64)
        for key in "qkv":
            store.put(key, value)
        for key in "qkv":
            assert torch.equal(store.take(key) if takes_at_once else store.get(key), value)
        assert store.stats().moved_up_bytes == value.nbytes


def test_small_parts_of_one_storage() -> None:
    base = torch.randn(12, 100)
    on_device, on_host = ActivationStore(), ActivationStore(host="1MiB")
    for key, part in enumerate(base.split(3)):
        on_device.put(key, part)
        on_host.put(key, part)
        check_books(on_device)
        check_books(on_host)
    assert on_device.stats().held_bytes == 4800  # they keep one storage alive, once
    on_device.take(0)
    assert on_device.stats().held_bytes == 4800
    assert on_host.stats().held_bytes == 4800  # four copies of a quarter each
    on_host.take(0)
    assert on_host.stats().held_bytes == 3600
    assert torch.equal(on_host.get(2), base[6:9])


def test_a_storage_reused_by_the_allocator_is_another_value() -> None:
    store = ActivationStore(host="1GiB")
    kept = []
    for key in range(50):
        value = torch.full((1000,), float(key))
        store.put(key, value)
        kept.append(float(key))
        del value
    assert [store.get(key)[0].item() for key in range(50)] == kept


def test_the_same_storage_after_a_change_is_another_value() -> None:
    store = ActivationStore(host="1MiB")
    x = torch.ones(10)
    store.put("before", x)
    x.add_(1)
    store.put("after", x)
    assert store.get("before")[0] == 1 and store.get("after")[0] == 2


def test_parameters_and_their_views_are_left_alone() -> None:
    linear = nn.Linear(10, 10)
    store = ActivationStore(host="1MiB")
    for key, tensor in {"w": linear.weight, "t": linear.weight.t(), "v": linear.weight.detach().view(-1)[:3]}.items():
        store.put(key, tensor)
    cast = linear.weight.to(torch.float64).t()
    store.put("cast", cast)
    assert store.get("w") is linear.weight and torch.equal(store.get("cast"), cast)
    assert store.stats().held_bytes <= 400


UNUSUAL: dict[str, Any] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "complex": lambda: torch.randn(5, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(5, dtype=torch.complex64).conj(),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3.0),
    "expanded": lambda: torch.randn(1, 5).expand(7, 5),
    "strided": lambda: torch.randn(10, 10)[::2, ::3],
    "bool": lambda: torch.rand(50) < 0.5,
    "int64": lambda: torch.arange(50),
    "float8": lambda: torch.randn(64).to(torch.float8_e4m3fn),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "negative view": lambda: torch.randn(5, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("codec", [None, "lossless"])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_unusual_tensors_come_back_exactly(kind: str, codec: str | None, tier: str, tmp_path: Path) -> None:
    tensor = UNUSUAL[kind]()
    with ActivationStore(**{tier: "1MiB"}, codec=codec, folder=tmp_path) as store:
        store.put("x", tensor)
        back = store.get("x")
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and back.layout == tensor.layout
    if tensor.layout is torch.strided:
        assert back.stride() == tensor.stride()
        assert torch.equal(back.float() if kind == "float8" else back, tensor.float() if kind == "float8" else tensor)
    else:
        assert torch.equal(back.to_dense(), tensor.to_dense())


def test_subclasses_are_left_alone() -> None:
    class Mine(Tensor):
        pass

    tensor = torch.randn(5).as_subclass(Mine)
    store = ActivationStore(host="1MiB")
    store.put("x", tensor)
    assert store.get("x") is tensor


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("codec", ["float16", "bfloat16", "float8_e4m3", "float8_e5m2", "int8", "int4"])
def test_codecs_shrink_what_is_held(codec: str, tier: str, tmp_path: Path) -> None:
    value = torch.randn(64, 128)
    with ActivationStore(**{tier: "1MiB"}, codec=codec, folder=tmp_path) as store:
        store.put("x", value.t())
        share = {"float16": 0.5, "bfloat16": 0.5, "int4": 0.125}.get(codec, 0.25)
        assert share * value.nbytes <= store.stats().held_bytes <= share * value.nbytes * 1.07 + 8
        back = store.get("x")
        assert back.stride() == value.t().stride() and back.dtype == torch.float32
        assert 0 < (back - value.t()).abs().max() < 0.4
        store.put("exact", value, codec=None)
        assert torch.equal(store.get("exact"), value)
        store.put("indices", torch.arange(10_000))
        assert torch.equal(store.get("indices"), torch.arange(10_000))


def test_a_value_changed_in_place_is_refused_on_the_device() -> None:
    store = ActivationStore()
    x = torch.ones(5)
    store.put("x", x)
    x[2:].add_(1)
    with pytest.raises(ChangedInPlaceError, match="'x' was changed in place"):
        store.get("x")


def test_books_equal_the_profilers_to_the_byte() -> None:
    for tier in ("host", "device"):
        store = ActivationStore(**{tier: "1GiB"}, codec="float16")
        values = [torch.randn(size) for size in (5000, 12_345, 70_001)]
        totals = cpu_allocation_totals(lambda s=store, v=values: [s.put(i, x) for i, x in enumerate(v)])
        assert totals[-1] == store.stats().held_bytes
        plain = ActivationStore(host="1GiB")
        totals = cpu_allocation_totals(lambda s=plain, v=values: [s.put(i, x) for i, x in enumerate(v)])
        assert totals[-1] == plain.stats().held_bytes


# Disk and faults


def test_the_spill_folder_is_private_and_goes_away(tmp_path: Path) -> None:
    store = ActivationStore(disk="1MiB", folder=tmp_path)
    assert not list(tmp_path.iterdir())
    store.put("x", value := floats(4000))
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert torch.equal(store.get("x"), value)
    store.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreError, match="closed"):
        store.put("y", value)
    store = ActivationStore(disk="1MiB", folder=tmp_path)
    store.put("x", value)
    del store
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path) -> None:
    script = f"""
        import os, signal, torch, lowtide
        store = lowtide.ActivationStore(disk="1MiB", folder={str(tmp_path)!r})
        store.put("x", torch.ones(1000))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    with ActivationStore(disk="1MiB", folder=tmp_path) as living:
        living.put("x", torch.ones(10))
        assert len(list(tmp_path.iterdir())) == 1  # the orphan is gone, and ours is here
        with ActivationStore(disk="1MiB", folder=tmp_path) as second:
            second.put("y", torch.ones(10))
            assert torch.equal(living.get("x"), torch.ones(10))  # a living store's folder is no orphan


def test_damage_and_loss_on_disk_are_noticed(tmp_path: Path) -> None:
    store = ActivationStore(disk="1MiB", folder=tmp_path)
    store.put("x", floats(4000))
    (file,) = tmp_path.glob("*/*.bin")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        store.get("x")
    file.write_bytes(content[:50])
    with pytest.raises(StoreError, match="cannot read back"):
        store.get("x")
    file.unlink()
    with pytest.raises(StoreError, match="Was the spill folder removed"):
        store.get("x")
    store.remove("x")
    check_books(store)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ActivationStore(device=1000, disk="1MiB", folder=tmp_path)
    store.put("a", a := floats(800))

    def full(*args: Any) -> int:  # the file exists, and nothing is in it yet
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lowtide.store.disk.zlib.crc32", full)
        with pytest.raises(StoreError, match=r"No space left on device.*Free space there or lower disk="):
            store.put("b", floats(800))
    assert torch.equal(store.get("a"), a) and not store.has("b")
    check_books(store)
    assert not list(tmp_path.glob("*/*.bin"))
    store.put("b", floats(800))
    check_books(store)


def test_an_unusable_folder() -> None:
    with pytest.raises(StoreError, match="cannot make a spill folder"):
        ActivationStore(disk="1MiB", folder="/proc/nowhere").put("x", floats(400))


# Threads and random walks


def test_threads_put_and_take_at_once() -> None:
    store = ActivationStore(device=20_000, host=20_000, disk=10_000_000)
    failures: list[str] = []

    def work(name: int) -> None:
        for i in range(60):
            value = torch.full((500,), float(name * 1000 + i))
            store.put((name, i), value)
            if i % 3 == 0 and not torch.equal(store.take((name, i)), value):
                failures.append(f"{name} {i}")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(store) == 4 * 40
    check_books(store)
    store.close()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "get", "take", "remove"]), st.integers(0, 6), st.integers(1, 300)),
        max_size=40,
    ),
    st.sampled_from(["spill", "evict", "error"]),
    st.booleans(),
)
def test_random_walks_keep_the_books(steps: list[tuple[str, int, int]], on_full: str, with_costs: bool) -> None:
    store = ActivationStore(device=1000, host=700, disk=900, on_full=on_full)
    expected: dict[int, Tensor] = {}
    for operation, key, size in steps:
        try:
            if operation == "put":
                value = torch.randn(size)
                store.put(key, value, cost=float(size) if with_costs else None)
                expected[key] = value
            elif operation == "get":
                value = store.get(key)
                assert isinstance(value, Missing) or torch.equal(value, expected[key])
            elif operation == "take":
                value = store.take(key)
                assert isinstance(value, Missing) or torch.equal(value, expected[key])
                expected.pop(key)
            else:
                store.remove(key)
                expected.pop(key)
        except CapacityError:
            pass
        except KeyError:
            assert key not in expected
        check_books(store)
        if on_full != "evict":
            assert set(store) == set(expected)
    store.close()


# The pool of locked memory, without a device


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40 * GRANULE_BYTES), max_size=30), st.randoms())
def test_pool_extents_never_overlap_and_join_again(sizes: list[int], choice: Any) -> None:
    pool = PinnedPool(200 * GRANULE_BYTES, pin=False)
    held: list[Any] = []
    for size in sizes:
        extents = pool.allocate(size)
        if extents is None:
            assert sum(e.nbytes for es in held for e in es) + round_up(size) > 128 * GRANULE_BYTES
            if held:
                pool.release(held.pop(choice.randrange(len(held))))
            continue
        assert sum(extent.nbytes for extent in extents) == round_up(size)
        held.append(extents)
        runs = sorted(extent for es in held for extent in es)
        for a, b in pairwise(runs):
            assert a.slab != b.slab or a.start + a.nbytes <= b.start
    assert pool.locked_bytes <= 200 * GRANULE_BYTES
    for extents in held:
        pool.release(extents)
    assert sum(extent.nbytes for extent in pool._free) == pool._free_bytes == pool.locked_bytes
    assert len(pool._free) == len(pool._slabs), "neighbours that were not joined"


def test_stats_print_well() -> None:
    store = ActivationStore(device="1KiB", host="1MiB")
    for key in range(30):
        store.put(key, floats(400), cost=1.0)
    text = str(store.stats())
    assert "30 values" in text and "spilled" in text and "and 10 more" in text
    assert len(text.splitlines()) <= 30
    assert str(ActivationStore().stats()).count("no limit") == 1
    assert lowtide.ActivationStore().stats().utilization_by_tier == {"device": 0}


# Regressions


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_part_from_the_middle_comes_back_as_itself(tier: str) -> None:
    base = torch.arange(1000.0)
    with ActivationStore(**{tier: "1MiB"}) as store:
        store.put("part", base[700:705])
        store.put("from the start", base[:10])
        store.put("whole", base)
        assert torch.equal(store.get("part"), base[700:705])
        assert torch.equal(store.get("from the start"), base[:10])
        assert torch.equal(store.get("whole"), base)
        check_books(store)


def test_a_change_before_a_spill_is_noticed_after_it() -> None:
    store = ActivationStore(device=500, host="1MiB")
    x = torch.ones(100)
    store.put("x", x)
    x.add_(1)
    store.put("y", torch.ones(100))
    assert store.stats().num_spilled == 1
    with pytest.raises(ChangedInPlaceError):
        store.get("x")


def test_what_was_given_out_and_changed_is_refused() -> None:
    store = ActivationStore(host="1MiB")
    store.put("x", torch.ones(100))
    store.get("x").add_(1)
    with pytest.raises(ChangedInPlaceError, match="Clone what you get"):
        store.get("x")


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("codec", [None, "float16"])
def test_in_inference_mode(tier: str, codec: str | None) -> None:
    with ActivationStore(**{tier: "1MiB"}, codec=codec) as store, torch.inference_mode():
        for value in (1.0, 2.0):
            x = torch.full((2000,), value)
            store.put(value, x)
            x.add_(5)
        if tier != "device" or codec:
            assert store.get(1.0)[0] == 1 and store.get(2.0)[0] == 2


def test_a_newcomer_goes_below_what_cannot_move() -> None:
    store = ActivationStore(device=1000, host=500)
    store.put("large", floats(800))  # does not fit below
    store.put("small", small := floats(400))
    assert {entry.key: entry.tier for entry in store.stats().entries} == {"large": "device", "small": "host"}
    assert torch.equal(store.get("small"), small)


def test_replacing_one_of_several_views_keeps_the_books() -> None:
    store = ActivationStore(device=800, host=800)
    x = torch.ones(100)
    store.put("p", x)
    store.put("q", x.view(torch.int32))
    store.put("p", torch.ones(150))
    check_books(store)
    store.clear()
    check_books(store)
    assert store.stats().held_bytes == 0


@pytest.mark.parametrize("cost", ["high", float("nan"), -1.0])
def test_a_bad_cost_changes_nothing(cost: Any) -> None:
    store = ActivationStore()
    with pytest.raises(ValueError, match="cost is a number"):
        store.put("x", torch.ones(3), cost=cost)
    check_books(store)


def test_a_store_is_no_cycle() -> None:
    gc.disable()
    try:
        store = ActivationStore(host="1MiB")
        store.put("x", torch.ones(10))
        references = [weakref.ref(store), weakref.ref(store._tiers)]
        del store
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_many_entries_stay_quick() -> None:
    """Counted in calls, not seconds: each put and get looks at a bounded number of units."""
    store = ActivationStore(host="1GiB")
    for key in range(3000):
        store.put(key, torch.ones(4))
    for key in reversed(range(3000)):
        store.take(key)
    assert len(store) == 0


def test_codecs_at_the_edges_of_floats() -> None:
    store = ActivationStore(host="1MiB")
    denormal = torch.full((2048,), 1e-42)
    denormal[::3] = 0
    huge = torch.full((2048,), torch.finfo(torch.float32).max)
    wide = torch.full((2048,), 1e200, dtype=torch.float64)
    for codec in ("float16", "bfloat16", "float8_e4m3", "float8_e5m2", "int8", "int4"):
        for value in (denormal, huge, wide):
            store.put("x", value, codec=codec)
            assert torch.isfinite(store.get("x")).all(), codec
    wide[5] = torch.inf
    store.put("x", wide, codec="int8")
    assert torch.isinf(store.get("x")).nonzero().tolist() == [[5]]


def test_all_views_of_an_evicted_storage_are_missing() -> None:
    store = ActivationStore(device=1000, on_full="evict")
    value = floats(600)
    store.put("whole", value)
    store.put("view", value.view(2, 75))
    store.put("other", floats(800))
    assert list(store) == ["other"] and store.stats().num_evicted == 2
    assert store.get("whole") == Missing("whole", torch.Size([150]), torch.float32, 600)
    assert store.get("view") == Missing("view", torch.Size([2, 75]), torch.float32, 600)


def test_after_a_refusal_the_store_is_free_for_others() -> None:
    store = ActivationStore(device=1000)
    for inference in (False, True):
        with pytest.raises(KeyError), torch.inference_mode(inference):
            store.get("none")
        assert not store._lock.locked() and not torch.is_inference_mode_enabled()
    store.close()
    for inference in (False, True):
        with pytest.raises(StoreError, match="closed"), torch.inference_mode(inference):
            store.get("none")
        assert not store._lock.locked() and not torch.is_inference_mode_enabled()


def test_a_value_put_again_under_its_key_can_still_be_evicted() -> None:
    store = ActivationStore(device=1000, on_full="evict")
    x = floats(400)
    store.put("x", x)
    store.put("x", x)
    store.put("large", floats(1000))
    assert isinstance(store.get("x"), Missing)
    check_books(store)


def test_wherever_it_is_interrupted_a_store_works_on() -> None:
    """Ctrl-C comes between any two lines."""
    num_interrupted = 0
    for nth in range(1000):
        store, seen = lowtide.ActivationStore(), 0

        def interrupt(frame: types.FrameType, event: str, arg: Any, nth: int = nth) -> Any:
            nonlocal seen
            if not frame.f_code.co_filename.endswith("store.py"):
                return None
            if event in ("call", "line"):
                seen += 1
                if seen == nth + 1:
                    raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            store.put("a", torch.ones(3))
            store.take("a")
        except KeyboardInterrupt:
            num_interrupted += 1
        finally:
            sys.settrace(before)
        assert store._lock.acquire(blocking=False), f"at line {nth}"
        store._lock.release()
        store.put("b", torch.ones(3))
        assert torch.equal(store.take("b"), torch.ones(3))
        if seen <= nth:
            break
    assert 20 < num_interrupted < 999
