"""`ActivationCheckpointer`: a layer loop by hand is exact, its books balance, and layers run as often as it says."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtide
from lowtide import (
    ActivationCheckpointer,
    ActivationStore,
    EveryN,
    KeepAll,
    MaxBytes,
    RecomputeAll,
    Revolve,
    Selective,
    SqrtN,
    StoreError,
    Uniform,
)
from lowtide.errors import CapacityError, ChangedInPlaceError, UnitError
from lowtide.policies import Policy, Segment, Segments


class Chain:
    """Layers `x -> tanh(x * w_i)` with a backward of their own, and a count of runs."""

    def __init__(self, n: int, width: int = 16) -> None:
        generator = torch.Generator().manual_seed(n)
        self.weights = torch.randn(n, width, generator=generator)
        self.x = torch.randn(width, generator=generator)
        self.grad = torch.randn(width, generator=generator)
        self.runs: Counter[int] = Counter()

    def fn(self, x: Tensor, i: int) -> Tensor:
        self.runs[i] += 1
        return torch.tanh(x * self.weights[i])

    def backward_fn(self, x: Tensor, grad: Tensor, i: int) -> Tensor:
        return grad * (1 - torch.tanh(x * self.weights[i]) ** 2) * self.weights[i]

    def plain(self) -> tuple[Tensor, Tensor]:
        states = [self.x]
        for i in range(len(self.weights)):
            states.append(torch.tanh(states[-1] * self.weights[i]))
        grad = self.grad
        for i in reversed(range(len(self.weights))):
            grad = self.backward_fn(states[i], grad, i)
        return states[-1], grad


def policies() -> st.SearchStrategy[Policy]:
    return st.one_of(
        st.just(KeepAll()),
        st.just(RecomputeAll()),
        st.just(SqrtN()),
        st.builds(EveryN, st.integers(0, 9)),
        st.builds(Uniform, st.integers(0, 9)),
        st.builds(Revolve, st.integers(1, 8)),
        st.builds(lambda a, b: Segments((Segment(a, a + b),)), st.integers(0, 10), st.integers(0, 10)),
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), policies(), st.integers(9, 64))
def test_any_chain_under_any_policy(n: int, policy: Policy, max_checkpoints: int) -> None:
    chain, layers = Chain(n), range(n)
    checkpointer = ActivationCheckpointer(policy, max_checkpoints=max_checkpoints)
    output = checkpointer.forward(chain.x, layers, chain.fn)
    expected_output, expected_grad = chain.plain()
    assert torch.equal(output, expected_output)
    kept = checkpointer.num_checkpoints
    nbytes = chain.x.nbytes
    assert kept <= max_checkpoints
    assert checkpointer.stored_bytes == kept * nbytes and checkpointer.saved_bytes == (n - kept) * nbytes
    replays = sum(1 for i in range(n - 1) if not checkpointer.has(i))
    if kept < max_checkpoints:
        assert [checkpointer.has(i) for i in layers] == [checkpointer.is_checkpoint_layer(i, n) for i in layers]
        assert [checkpointer.has(i) for i in layers] == [not policy.should_checkpoint(i, n) for i in layers]
    assert torch.equal(checkpointer.backward(chain.grad, layers, chain.fn, chain.backward_fn), expected_grad)
    stats = checkpointer.stats()
    assert stats.num_forwards == sum(chain.runs.values())
    assert checkpointer.num_checkpoints == 0 and checkpointer.stored_bytes == 0
    if isinstance(policy, Revolve):
        assert stats.num_forwards == policy.num_forwards(n)
        assert stats.max_held <= policy.slots
    else:
        assert stats.num_forwards == n + replays and max(chain.runs.values()) <= 2


def test_revolve_is_the_theorys_at_full_slots() -> None:
    for n, slots in ((10, 3), (35, 4), (100, 5), (64, 1)):
        chain = Chain(n)
        checkpointer = ActivationCheckpointer(Revolve(slots))
        checkpointer.forward(chain.x, range(n), chain.fn)
        assert torch.equal(checkpointer.backward(chain.grad, range(n), chain.fn, chain.backward_fn), chain.plain()[1])
        assert sum(chain.runs.values()) == Revolve(slots).num_forwards(n)
        assert checkpointer.stats().max_held == slots


def test_recompute_from_the_nearest_or_from_the_input() -> None:
    chain, layers = Chain(10), range(10)
    checkpointer = ActivationCheckpointer(Segments((Segment(0, 2), Segment(5, 6))))
    checkpointer.forward(chain.x, layers, chain.fn)
    states = [chain.x]
    for i in layers:
        states.append(torch.tanh(states[-1] * chain.weights[i]))
    for i in layers:
        before = sum(chain.runs.values())
        assert torch.equal(checkpointer.recompute(i, layers, chain.fn), states[i + 1])
        assert sum(chain.runs.values()) - before == {0: 1, 1: 2, 2: 3, 5: 1, 6: 2}.get(i, 0)
    with pytest.raises(ValueError, match="layer 12 is not among the layers"):
        checkpointer.recompute(12, layers, chain.fn)


def test_layers_need_not_be_contiguous() -> None:
    chain = Chain(30)
    layers = [2, 3, 8, 12, 20, 29]
    checkpointer = ActivationCheckpointer(EveryN(4))
    output = checkpointer.forward(chain.x, layers, chain.fn)
    assert [layer for layer in layers if checkpointer.has(layer)] == [8, 12, 20]
    x = chain.x
    for i in layers:
        x = torch.tanh(x * chain.weights[i])
    assert torch.equal(output, x)
    assert torch.equal(checkpointer.recompute(29, layers, chain.fn), x)


def test_bookkeeping_by_hand() -> None:
    checkpointer = ActivationCheckpointer(EveryN(2), max_checkpoints=2)
    assert checkpointer.is_checkpoint_layer(4) and not checkpointer.is_checkpoint_layer(5)
    a, b = torch.randn(8), torch.randn(8)
    checkpointer.save(0, a)
    checkpointer.save(2, b)
    checkpointer.save(2, a)  # renews, and does not count twice
    assert checkpointer.num_checkpoints == 2 and torch.equal(checkpointer.get(2), a)
    with pytest.raises(CapacityError, match=r"layer 4 would be checkpoint 3 of at most 2 \(kept are \[0, 2\]\)"):
        checkpointer.save(4, b)
    with pytest.raises(KeyError, match=r"layer 1 was not kept; kept are \[0, 2\]"):
        checkpointer.get(1)
    checkpointer.clear()
    assert checkpointer.num_checkpoints == checkpointer.stored_bytes == checkpointer.saved_bytes == 0
    with pytest.raises(KeyError, match="none is kept"):
        checkpointer.get(0)


def test_beyond_max_checkpoints_forward_keeps_no_more() -> None:
    chain = Chain(12)
    checkpointer = ActivationCheckpointer(EveryN(1), max_checkpoints=3)
    checkpointer.forward(chain.x, range(12), chain.fn)
    assert checkpointer.num_checkpoints == 3 and checkpointer.saved_bytes == 9 * chain.x.nbytes
    assert torch.equal(checkpointer.backward(chain.grad, range(12), chain.fn, chain.backward_fn), chain.plain()[1])


@pytest.mark.parametrize("codec", ["float16", "bfloat16"])
def test_sixteen_bits_halve_the_bytes(codec: str) -> None:
    chain = Chain(8, width=4096)
    exact, half = ActivationCheckpointer(EveryN(2)), ActivationCheckpointer(EveryN(2), codec=codec)
    for checkpointer in (exact, half):
        checkpointer.forward(chain.x, range(8), chain.fn)
    assert half.stored_bytes == pytest.approx(exact.stored_bytes / 2, rel=0.001)
    error = (half.get(4) - exact.get(4)).abs().max() / exact.get(4).abs().max()
    assert 0 < error <= {"float16": 2**-11, "bfloat16": 2**-8}[codec]


def test_in_a_store_of_ones_own(tmp_path: Any) -> None:
    chain = Chain(12, width=256)
    with ActivationStore(device=2048, host=2048, disk="1MiB", folder=tmp_path) as store:
        first, second = ActivationCheckpointer(EveryN(2), store=store), ActivationCheckpointer(EveryN(3), store=store)
        for checkpointer in (first, second):
            checkpointer.forward(chain.x, range(12), chain.fn)
        for checkpointer in (first, second):
            grad = checkpointer.backward(chain.grad, range(12), chain.fn, chain.backward_fn)
            assert torch.equal(grad, chain.plain()[1])
    evicting = ActivationCheckpointer(EveryN(2), store=ActivationStore(device=2100, on_full="evict"))
    evicting.forward(chain.x, range(12), chain.fn)
    assert torch.equal(evicting.recompute(0, range(12), chain.fn), torch.tanh(chain.x * chain.weights[0]))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="EveryN"):
        ActivationCheckpointer(4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_checkpoints"):
        ActivationCheckpointer(max_checkpoints=-1)
    with pytest.raises(ValueError, match="and codec to the store"):
        ActivationCheckpointer(codec="int8", store=ActivationStore())
    with pytest.raises(ValueError, match="raise max_checkpoints"):
        ActivationCheckpointer(Revolve(10), max_checkpoints=3)
    checkpointer = ActivationCheckpointer()
    with pytest.raises(StoreError, match="call forward"):
        checkpointer.recompute(1, range(3), lambda x, i: x)
    with pytest.raises(StoreError, match="no forward pass to go back through: call forward"):
        checkpointer.backward(torch.ones(3), range(3), lambda x, i: x, lambda x, g, i: g)
    with pytest.raises(TypeError, match="layer 0 gave tuple: layers give a tensor or a numpy array"):
        checkpointer.forward(torch.ones(3), range(3), lambda x, i: (x, x))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="costs has 2 values for 3 layers"):
        checkpointer.forward(torch.ones(3), range(3), lambda x, i: x, costs=[1, 2])
    with pytest.raises(ValueError, match="decides by costs: give costs="):
        ActivationCheckpointer(Selective(3)).forward(torch.ones(3), range(3), lambda x, i: x)
    with pytest.raises(ValueError, match="budget, order and codec to the store"):
        ActivationCheckpointer(budget=100, store=ActivationStore())
    assert str(lowtide.ActivationCheckpointer().stats()).startswith("0 layers kept")


def test_bad_input_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"a budget of 0 bytes has no room for the input.*enabled=False"):
        ActivationCheckpointer(budget=0)
    with pytest.raises(UnitError, match='"512MiB"\\)'):  # no share is suggested
        ActivationCheckpointer(budget="50%")
    checkpointer = ActivationCheckpointer(budget="100B")
    with pytest.raises(CapacityError, match="the input, which is always held, takes 256 B, and budget='100B' has no"):
        checkpointer.forward(torch.ones(64), range(3), lambda x, i: x)
    with pytest.raises(CapacityError, match=r"the activation takes 256 B, and budget='100B' has no room for that"):
        checkpointer.save(0, torch.ones(64))
    checkpointer.forward(torch.ones(20), range(3), lambda x, i: x)
    with pytest.raises(CapacityError, match="no room for that beside the input"):
        checkpointer.save(0, torch.ones(20))
    for bad in (3.0, [1.0], None):
        with pytest.raises(TypeError, match="an activation is a tensor or a numpy array, not"):
            checkpointer.forward(bad, range(3), lambda x, i: x)
    with pytest.raises(TypeError, match=r"layers are the numbers of the layers, such as range\(12\), not 6"):
        checkpointer.forward(torch.ones(3), 6, lambda x, i: x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="costs are numbers, 0 or more; layer 1 has nan"):
        ActivationCheckpointer(Selective(1)).forward(torch.ones(3), range(2), add, costs=[1, float("nan")])
    with pytest.raises(TypeError, match=r"ActivationStore\(device=24, on_full='evict'\) cannot be copied or pickled"):
        pickle.dumps(ActivationCheckpointer(budget=24))
    in_place = ActivationCheckpointer(EveryN(2))
    in_place.forward(torch.ones(4), range(3), lambda x, i: x.mul_(2) if i else x + 1)
    with pytest.raises(ChangedInPlaceError, match="position 0 of the layers that ran was changed in place since"):
        in_place.recompute(1, range(3), lambda x, i: x)


def test_revolve_is_not_continued_and_says_so() -> None:
    checkpointer = ActivationCheckpointer(Revolve(2))
    checkpointer.forward(checkpointer.forward(torch.ones(3), [0, 1], add), [2, 3], add)
    with pytest.raises(ValueError, match=r"that ran, \[2, 3\].*a pass of its own under Revolve"):
        checkpointer.recompute(1, range(4), add)


# Chunks and repeated layers


def add(x: Tensor, i: int) -> Tensor:
    return 2 * x + i


def states_of(x: Tensor, layers: list[int]) -> list[Tensor]:
    states = []
    for i in layers:
        x = add(x, i)
        states.append(x)
    return states


def test_a_forward_given_the_output_of_the_last_continues_it() -> None:
    x, layers = torch.ones(4), list(range(6))
    states = states_of(x, layers)
    for policy in (EveryN(4), RecomputeAll(), KeepAll(), SqrtN(), Uniform(2)):
        checkpointer = ActivationCheckpointer(policy)
        y = checkpointer.forward(x, [0, 1, 2], add)
        assert torch.equal(checkpointer.forward(y, [3, 4, 5], add), states[5])
        for i in layers:
            assert torch.equal(checkpointer.recompute(i, layers, add), states[i])
        assert torch.equal(checkpointer.recompute(4, [3, 4, 5], add), states[4])
        seen: list[float] = []
        back = lambda x, grad, i, seen=seen: seen.append(x[0].item()) or grad * 2  # noqa: E731
        grad = checkpointer.backward(torch.ones(4), [3, 4, 5], add, back)
        grad = checkpointer.backward(grad, [0, 1, 2], add, back)
        assert grad[0] == 64 and seen == [state[0].item() for state in [*reversed(states[:5]), x]]
        assert len(checkpointer.store) == 0


@pytest.mark.parametrize("change", [lambda y: y.clone(), lambda y: y.mul_(2), lambda y: y + 1])
def test_any_other_input_begins_a_new_pass(change: Any) -> None:
    checkpointer = ActivationCheckpointer(EveryN(4))
    y = checkpointer.forward(torch.ones(4), [0, 1, 2], add)
    checkpointer.forward(change(y), [3, 4, 5], add)
    for call in (
        lambda: checkpointer.recompute(1, range(6), add),
        lambda: checkpointer.backward(torch.ones(4), range(6), add, lambda x, g, i: g),
    ):
        with pytest.raises(ValueError, match=r"\[0, 1, 2, 3, 4, 5\] are not those that ran, \[3, 4, 5\]"):
            call()
    assert not checkpointer.has(0) and checkpointer.has(4)


def test_a_loop_that_is_fed_its_own_output_is_a_new_pass_each_time() -> None:
    for policy in (EveryN(2), Revolve(2)):
        checkpointer, x = ActivationCheckpointer(policy), torch.ones(4)
        for _ in range(3):
            states = states_of(x, [0, 1, 2])
            x = checkpointer.forward(x, range(3), add)
            assert torch.equal(checkpointer.recompute(1, range(3), add), states[1])
            assert checkpointer.stats().num_forwards <= 5


def test_repeated_layers() -> None:
    x, layers = torch.ones(4), [0, 1, 0, 1]
    states = states_of(x, layers)
    for policy in (EveryN(2), RecomputeAll(), KeepAll(), Revolve(2), SqrtN()):
        checkpointer = ActivationCheckpointer(policy)
        assert torch.equal(checkpointer.forward(x, layers, add), states[3])
        assert torch.equal(checkpointer.recompute(1, layers, add), states[3])
        assert torch.equal(checkpointer.recompute(0, layers, add), states[2])
        assert torch.equal(checkpointer.recompute(1, [0, 1], add), states[1])
        seen: list[float] = []
        checkpointer.backward(torch.ones(4), layers, add, lambda x, g, i, seen=seen: seen.append(x[0].item()) or g)
        assert seen == [states[2][0], states[1][0], states[0][0], 1.0]


# Replays find what the forward found


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(6)
        )

    def layer(self, x: Tensor, i: int) -> Tensor:
        return self.layers[i](x)


@pytest.mark.parametrize("policy", [RecomputeAll(), EveryN(2), SqrtN(), Revolve(2), Revolve(3), KeepAll()], ids=str)
@pytest.mark.parametrize("how", ["method", "lambda"])
def test_random_numbers_and_buffers_are_those_of_the_forward(policy: Policy, how: str) -> None:
    torch.manual_seed(0)
    model, x, layers = Noisy(), torch.randn(16, 8), range(6)
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    states = [x]
    with torch.no_grad():
        for i in layers:
            states.append(plain.layer(states[-1], i))
    after = torch.random.get_rng_state()
    torch.manual_seed(1)
    checkpointer = ActivationCheckpointer(policy)
    fn = model.layer if how == "method" else lambda x, i: model.layers[i](x)
    assert torch.equal(checkpointer.forward(x, layers, fn), states[-1])
    for i in (4, 0, 2):
        assert torch.equal(checkpointer.recompute(i, layers, fn), states[i + 1])
    seen = []
    checkpointer.backward(x, layers, fn, lambda x, grad, i: seen.append(x.clone()) or grad)
    assert all(map(torch.equal, reversed(seen), states[:-1])) and len(seen) == 6
    assert torch.equal(torch.random.get_rng_state(), after)
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_random_numbers_drawn_between_chunks() -> None:
    checkpointer = ActivationCheckpointer(RecomputeAll())
    noise = lambda x, i: x + torch.rand(4)  # noqa: E731
    y = checkpointer.forward(torch.zeros(4), [0, 1], noise)
    torch.rand(100)
    z = checkpointer.forward(y, [2, 3], noise)
    assert torch.equal(checkpointer.recompute(3, range(4), noise), z)


def test_numpy_random_numbers_of_a_closure() -> None:
    generator = np.random.default_rng(0)
    noise = lambda x, i: x + generator.random(4)  # noqa: E731
    checkpointer = ActivationCheckpointer(RecomputeAll())
    y = checkpointer.forward(np.zeros(4), range(3), noise)
    following = copy.deepcopy(generator).random()
    assert np.array_equal(checkpointer.recompute(2, range(3), noise), y)
    assert generator.random() == following


def test_pythons_and_numpys_random_numbers_however_they_are_imported() -> None:
    import random as own

    def by_closure(x: Any, i: int) -> Any:
        return x + own.random()

    def by_name(x: Any, i: int) -> Any:
        return x + np.random.rand()

    def inside(x: Any, i: int) -> Any:
        import random

        import numpy

        return x + random.random() + numpy.random.rand()

    def from_inside(x: Any, i: int) -> Any:
        from numpy.random import rand

        return x + rand()

    for noise in (by_closure, by_name, inside, from_inside):
        checkpointer = ActivationCheckpointer(RecomputeAll())
        y = checkpointer.forward(np.zeros(4), range(3), noise)
        following = own.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
        assert np.array_equal(checkpointer.recompute(2, range(3), noise), y)
        assert following == (own.getstate(), np.random.get_state()[1].tolist())  # type: ignore[union-attr]


def test_weights_changed_between_forward_and_replay_are_refused() -> None:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    fn = lambda x, i: layers[i](x)  # noqa: E731
    checkpointer = ActivationCheckpointer(EveryN(3))
    checkpointer.forward(torch.randn(2, 8), range(4), fn)
    with torch.no_grad():
        layers[2].weight.add_(1)
    checkpointer.recompute(1, range(4), fn)  # reads other weights
    with pytest.raises(lowtide.CheckpointError, match="modified by an inplace operation"):
        checkpointer.recompute(2, range(4), fn)


def test_layers_run_without_gradients_and_replays_are_known() -> None:
    weight = torch.randn(8, requires_grad=True)
    seen = []

    def fn(x: Tensor, i: int) -> Tensor:
        seen.append((torch.is_grad_enabled(), lowtide.is_recomputing()))
        return x * weight

    checkpointer = ActivationCheckpointer(RecomputeAll())
    x = torch.randn(8, requires_grad=True)
    output = checkpointer.forward(x, range(2), fn)
    assert output.grad_fn is None and not output.requires_grad and torch.is_grad_enabled()
    assert checkpointer.recompute(1, range(2), fn).grad_fn is None
    assert seen == [(False, False)] * 2 + [(False, True)] * 2


def test_layers_that_change_their_input_are_refused() -> None:
    for x in (torch.ones(4), np.ones(4, dtype=np.float32)):

        def double(x: Any, i: int) -> Any:
            if i:
                x *= 2
                return x
            return x + 1

        for policy in (RecomputeAll(), Revolve(1)):
            checkpointer = ActivationCheckpointer(policy)
            checkpointer.forward(x, range(4), double)
            with pytest.raises(lowtide.CheckpointError, match="changes one of its inputs in place"):
                checkpointer.backward(x, range(4), double, lambda x, g, i: g)
            assert len(checkpointer.store) == 0


def test_after_an_exception_nothing_is_held() -> None:
    def fails(*arguments: Any) -> Any:
        if arguments[-1] == 2:
            raise RuntimeError("layer 2")
        return arguments[0] + 1

    checkpointer = ActivationCheckpointer(KeepAll())
    with pytest.raises(RuntimeError, match="layer 2"):
        checkpointer.forward(torch.ones(4), range(4), fails)
    assert len(checkpointer.store) == 0
    checkpointer.forward(torch.ones(4), range(4), add)
    with pytest.raises(RuntimeError, match="layer 2"):
        checkpointer.backward(torch.ones(4), range(4), add, fails)
    assert len(checkpointer.store) == 0


# The manager: budget, costs, eviction, statistics, enabled


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), policies(), st.integers(1, 12), st.sampled_from(["oldest", "cost", "auto"]), st.booleans())
def test_what_is_evicted_is_recomputed(n: int, policy: Policy, room: int, order: str, with_costs: bool) -> None:
    chain, layers = Chain(n), range(n)
    checkpointer = ActivationCheckpointer(policy, budget=room * chain.x.nbytes, order=order)
    costs = [float(i * 7 % 5) for i in layers] if with_costs else None
    checkpointer.forward(chain.x, layers, chain.fn, costs=costs)
    stats = checkpointer.stats()
    assert stats.num_checkpoints == stats.num_created - stats.num_evicted <= max(room - 1, 0)
    assert stats.stored_bytes + stats.saved_bytes == n * chain.x.nbytes
    assert stats.stored_bytes <= (room - 1) * chain.x.nbytes
    x = chain.x
    for i in layers:
        x = torch.tanh(x * chain.weights[i])
        assert torch.equal(checkpointer.recompute(i, layers, chain.fn), x)
    assert torch.equal(checkpointer.backward(chain.grad, layers, chain.fn, chain.backward_fn), chain.plain()[1])
    assert len(checkpointer.store) == 0


def test_costs_decide_what_is_evicted() -> None:
    chain, costs = Chain(6), [900.0, 1.0, 800.0, 2.0, 700.0, 3.0]
    checkpointer = ActivationCheckpointer(KeepAll(), budget=4 * chain.x.nbytes, order="cost")
    checkpointer.forward(chain.x, range(6), chain.fn, costs=costs)
    assert [i for i in range(6) if checkpointer.has(i)] == [2, 4, 5]  # 1 and 3 went first, then 0, the longest unused
    with pytest.raises(KeyError, match=r"layer 1 was evicted; kept are \[2, 4, 5\]"):
        checkpointer.get(1)
    oldest = ActivationCheckpointer(KeepAll(), budget=4 * chain.x.nbytes, order="oldest")
    oldest.forward(chain.x, range(6), chain.fn, costs=costs)
    assert [i for i in range(6) if oldest.has(i)] == [3, 4, 5]


def test_selective_goes_by_costs() -> None:
    chain, costs = Chain(6), [1, 100, 99, 250, 0, 100]
    checkpointer = ActivationCheckpointer(Selective(100))
    checkpointer.forward(chain.x, range(6), chain.fn, costs=costs)
    assert [i for i in range(6) if checkpointer.has(i)] == [1, 3, 5]
    assert [i for i in range(6) if checkpointer.is_checkpoint_layer(i, 6, costs=costs)] == [1, 3, 5]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(0, 20))
def test_max_bytes_agrees_with_decide(costs: list[int], room: int) -> None:
    n = len(costs)
    chain = Chain(n)
    policy = MaxBytes(room * chain.x.nbytes)
    checkpointer = ActivationCheckpointer(policy)
    checkpointer.forward(chain.x, range(n), chain.fn, costs=costs)
    assert [not checkpointer.has(i) for i in range(n)] == policy.decide(n, costs, [chain.x.nbytes] * n)
    assert checkpointer.saved_bytes == n * chain.x.nbytes - checkpointer.stored_bytes
    assert torch.equal(checkpointer.backward(chain.grad, range(n), chain.fn, chain.backward_fn), chain.plain()[1])


def test_max_bytes_with_layers_of_different_sizes() -> None:
    checkpointer = ActivationCheckpointer(MaxBytes(1000))
    checkpointer.forward(torch.ones(10), range(20), lambda x, i: torch.ones(10 + 17 * i % 100))
    assert 0 < checkpointer.stored_bytes <= 1000


def test_the_manager_by_hand() -> None:
    checkpointer = ActivationCheckpointer(Selective(10), budget=1200)
    values = [torch.randn(100) for _ in range(5)]
    kept = [checkpointer.maybe_save(i, values[i], cost=cost) for i, cost in enumerate([10, 5, 20, 30, 40])]
    assert kept == [True, False, True, True, True]
    stats = checkpointer.stats()
    assert (stats.num_created, stats.num_evicted, stats.num_checkpoints) == (4, 1, 3)
    assert stats.stored_bytes_by_tier == {"device": 1200} and stats.utilization_by_tier == {"device": 1.0}
    assert not checkpointer.has(0) and torch.equal(checkpointer.take(4), values[4]) and not checkpointer.has(4)
    checkpointer.save(2, values[2])  # again, which creates none
    assert checkpointer.stats().num_created == 4
    checkpointer.remove(2)
    checkpointer.remove(2)  # absent
    with pytest.raises(KeyError, match="layer 4 was not kept"):
        checkpointer.take(4)
    checkpointer.clear()
    assert checkpointer.stats().num_created == checkpointer.stats().num_evicted == 0
    every = ActivationCheckpointer(EveryN(2))
    assert [every.maybe_save(i, values[i]) for i in range(4)] == [True, False, True, False]
    assert torch.equal(every.recompute(3, range(5), lambda x, i: x + i), values[2] + 3)
    with pytest.raises(TypeError, match="how many layers"):
        ActivationCheckpointer(SqrtN()).maybe_save(0, values[0])


def test_disabled_only_runs_the_layers() -> None:
    checkpointer = ActivationCheckpointer(KeepAll())
    checkpointer.forward(torch.ones(4), range(3), add)
    checkpointer.enabled = False
    assert torch.equal(checkpointer.forward(torch.ones(4), range(3), add), states_of(torch.ones(4), [0, 1, 2])[-1])
    assert checkpointer.num_checkpoints == 0 and len(checkpointer.store) == 0
    with pytest.raises(StoreError, match="enabled=True"):
        checkpointer.backward(torch.ones(4), range(3), add, lambda x, g, i: g)
    assert not checkpointer.maybe_save(0, torch.ones(4)) and not checkpointer.has(0)
    checkpointer.enabled = True
    checkpointer.forward(torch.ones(4), range(3), add)
    assert checkpointer.num_checkpoints == 3


def test_evicted_states_do_not_count_as_held() -> None:
    checkpointer = ActivationCheckpointer(KeepAll(), budget=3 * 256)
    checkpointer.forward(torch.ones(64), range(8), add)
    assert checkpointer.stats().max_held == 3


def test_statistics_are_per_tier(tmp_path: Any) -> None:
    chain = Chain(8, width=256)
    with ActivationStore(device=2048, disk="1MiB", folder=tmp_path) as store:
        checkpointer = ActivationCheckpointer(KeepAll(), store=store)
        checkpointer.forward(chain.x, range(8), chain.fn)
        stats = checkpointer.stats()
        assert stats.stored_bytes_by_tier == {"device": 2048, "disk": 6 * 1024}
        assert stats.utilization_by_tier["device"] == 1.0 and "device 100%" in str(stats)


def test_a_policy_that_bounds_memory_is_not_cut_off_silently() -> None:
    layers = range(10_000)
    runs: list[int] = []
    with pytest.raises(ValueError, match=r"SqrtN\(\) keeps 100 layers .* max_checkpoints is 64: raise .*Revolve\(65\)"):
        ActivationCheckpointer(SqrtN(), max_checkpoints=64).forward(
            torch.ones(1), layers, lambda x, i: runs.append(i) or x
        )
    assert not runs
    with pytest.raises(ValueError, match="keeps 9 layers"):
        ActivationCheckpointer(Uniform(10), max_checkpoints=8).forward(torch.ones(1), range(100), add)
    checkpointer = ActivationCheckpointer(SqrtN())
    checkpointer.forward(torch.ones(1), range(400), lambda x, i: x + 1)
    checkpointer.backward(torch.ones(1), range(400), lambda x, i: x + 1, lambda x, g, i: g)
    assert checkpointer.stats().max_held <= 2 * 20 + 1


# An object like others


def test_numpy_arrays() -> None:
    weights = np.random.default_rng(0).standard_normal((10, 16)).astype(np.float32)
    x, layers = np.ones(16, dtype=np.float32), range(10)

    def fn(x: Any, i: int) -> Any:
        assert isinstance(x, np.ndarray)
        return np.tanh(x * weights[i])

    states = [x]
    for i in layers:
        states.append(fn(states[-1], i))
    for policy in (EveryN(3), Revolve(3), RecomputeAll()):
        checkpointer = ActivationCheckpointer(policy)
        output = checkpointer.forward(x, range(5), fn)
        if not isinstance(policy, Revolve):
            output = checkpointer.forward(output, range(5, 10), fn)
        else:
            output = checkpointer.forward(x, layers, fn)
        output += 1  # what is kept is a copy
        for i in layers:
            assert np.array_equal(checkpointer.recompute(i, layers, fn), states[i + 1])
        seen: list[Any] = []
        checkpointer.backward(x, layers, fn, lambda x, grad, i, seen=seen: seen.append(x) or grad)
        assert all(map(np.array_equal, reversed(seen), states[:-1]))
    checkpointer.save(0, x[::-1])
    checkpointer.get(0)[0] = 7
    assert np.array_equal(checkpointer.get(0), x[::-1])


def test_states_of_any_kind() -> None:
    double = lambda x, i: x + x  # noqa: E731
    sparse = torch.tensor([0.0, 1.0]).to_sparse()
    for x in (np.float32(1), np.array(1.0), torch.tensor(1.0), torch.zeros(0), torch.ones(2, 3).t(), sparse):
        for policy in (EveryN(2), Revolve(1), MaxBytes(4)):
            checkpointer = ActivationCheckpointer(policy)
            y = checkpointer.forward(x, range(4), double)
            found = checkpointer.recompute(3, range(4), double)
            assert bool(
                (found == y).all() if y is not sparse and x is not sparse else (found - y).to_dense().sum() == 0
            )
            assert checkpointer.backward(1.0, range(4), double, lambda x, g, i: 2 * g) == 16


def test_a_finished_pass_leaves_nothing() -> None:
    for policy in (EveryN(3), Revolve(3), RecomputeAll()):
        checkpointer = ActivationCheckpointer(policy)
        checkpointer.forward(torch.ones(4), range(6), add)
        checkpointer.save(4, states_of(torch.ones(4), range(6))[4])  # type: ignore[arg-type]
        checkpointer.backward(torch.ones(4), range(6), add, lambda x, g, i: g)
        assert len(checkpointer.store) == 0


def test_threads_save_and_take_at_once() -> None:
    checkpointer, failed = ActivationCheckpointer(KeepAll(), budget=20 * 256), []

    def work(thread: int) -> None:
        try:
            for i in range(thread * 1000, thread * 1000 + 150):
                checkpointer.save(i, torch.full((64,), float(i)))
                if checkpointer.stats().num_checkpoints and checkpointer.has(i):
                    with contextlib.suppress(KeyError):  # evicted by another thread
                        assert checkpointer.take(i)[0] == i
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("policy", [EveryN(3), Revolve(3)], ids=str)
@pytest.mark.parametrize("is_shared", [False, True])
def test_copies_are_independent(copied: Any, policy: Policy, is_shared: bool) -> None:
    chain, layers = Chain(10), range(10)
    store = ActivationStore() if is_shared else None
    checkpointer = ActivationCheckpointer(policy, store=store)
    checkpointer.forward(chain.x, layers, chain.fn)
    other = copied(checkpointer)
    assert other.stats().num_checkpoints == checkpointer.num_checkpoints > 0 and repr(other) == repr(checkpointer)
    if copied is copy.deepcopy:  # one storage in one store counts once
        assert other.stats() == checkpointer.stats()
    assert (other.store is checkpointer.store) == is_shared
    checkpointer.clear()
    assert torch.equal(other.backward(chain.grad, layers, chain.fn, chain.backward_fn), chain.plain()[1])
    assert len(checkpointer.store) == len(other.store) == 0


def test_repr_and_configuration() -> None:
    assert repr(ActivationCheckpointer()) == "ActivationCheckpointer(EveryN(n=4))"
    checkpointer = ActivationCheckpointer(
        Selective(), max_checkpoints=9, budget="1MiB", order="cost", codec="int8", enabled=False
    )
    assert eval(repr(checkpointer), vars(lowtide)).__repr__() == repr(checkpointer)
    assert (checkpointer.policy, checkpointer.max_checkpoints) == (Selective(), 9)
    assert (checkpointer.budget, checkpointer.order, checkpointer.codec) == ("1MiB", "cost", "int8")
    assert not checkpointer.enabled and checkpointer.store.on_full == "evict"
    with pytest.raises(AttributeError):
        checkpointer.budget = 3


def test_a_dropped_checkpointer_leaves_nothing_in_a_shared_store() -> None:
    store = ActivationStore()
    for _ in range(3):
        checkpointer = ActivationCheckpointer(KeepAll(), store=store)
        checkpointer.forward(torch.ones(4), range(5), add)
        checkpointer.save(77, torch.ones(2))
    assert len(store) == 7
    del checkpointer
    gc.collect()
    assert len(store) == 0 and store.stats().held_bytes == 0


def test_layers_may_be_methods_of_what_holds_the_checkpointer() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.checkpointer = ActivationCheckpointer(EveryN(2))

        def layer(self, x: Tensor, i: int) -> Tensor:
            return add(x, i)

    trainer = Trainer()
    y = trainer.checkpointer.forward(torch.ones(4), range(4), trainer.layer)
    assert torch.equal(trainer.checkpointer.recompute(3, range(4), trainer.layer), y)
