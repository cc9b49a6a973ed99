"""`ActivationCheckpointer`: a layer loop by hand is exact, its books balance, and layers run as often as it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowtide
from lowtide import (
    ActivationCheckpointer,
    ActivationStore,
    CapacityError,
    EveryN,
    KeepAll,
    Policy,
    RecomputeAll,
    Revolve,
    Segment,
    Segments,
    SqrtN,
    StoreError,
    Uniform,
)


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
@given(st.integers(1, 40), policies(), st.integers(7, 64))
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
    if len(set(policy.decide(n))) == 1 or kept == policy.decide(n).count(False):
        assert [checkpointer.has(i) for i in range(n)] == [checkpointer.is_checkpoint_layer(i, n) for i in range(n)][
            : n if kept < max_checkpoints else 0
        ] or kept == max_checkpoints
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
    with pytest.raises(StoreError, match="evicted"):
        evicting.recompute(0, range(12), chain.fn)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="EveryN"):
        ActivationCheckpointer(4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_checkpoints"):
        ActivationCheckpointer(max_checkpoints=-1)
    with pytest.raises(ValueError, match="codec to the store"):
        ActivationCheckpointer(codec="int8", store=ActivationStore())
    with pytest.raises(ValueError, match="raise max_checkpoints"):
        ActivationCheckpointer(Revolve(10), max_checkpoints=3)
    checkpointer = ActivationCheckpointer()
    with pytest.raises(StoreError, match="call forward"):
        checkpointer.recompute(1, range(3), lambda x, i: x)
    with pytest.raises(ValueError, match="stands once"):
        checkpointer.forward(torch.ones(3), [1, 1], lambda x, i: x)
    assert str(lowtide.ActivationCheckpointer().stats()).startswith("0 layers kept")
