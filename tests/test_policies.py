from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lowtide
from lowtide import EveryN, KeepAll, MaxBytes, RecomputeAll, Revolve, Selective, SqrtN, Uniform
from lowtide.errors import UnitError
from lowtide.policies import Policy, Segment, Segments, plan_recomputation

POLICIES: list[Policy] = [
    KeepAll(),
    RecomputeAll(),
    EveryN(3),
    EveryN(0),
    Selective(),
    Selective(2.5),
    Segments([Segment(1, 2), Segment(4, 4)]),  # type: ignore[arg-type]
    Uniform(3),
    SqrtN(),
    Revolve(3),
    MaxBytes("1KiB"),
]


def kept(policy: Policy, n: int, **options: object) -> list[int]:
    return [layer for layer, recomputed in enumerate(policy.decide(n, **options)) if not recomputed]  # type: ignore[arg-type]


def test_what_each_keeps() -> None:
    assert kept(KeepAll(), 4) == [0, 1, 2, 3]
    assert kept(RecomputeAll(), 4) == []
    assert kept(EveryN(3), 10) == [0, 3, 6, 9]
    assert kept(EveryN(1), 3) == [0, 1, 2]
    assert kept(EveryN(0), 3) == []
    assert kept(Selective(), 4, costs=[99, 100, 101, 0]) == [1, 2]
    assert kept(Segments((Segment(1, 2), Segment(4, 4))), 6) == [0, 3, 5]
    assert kept(SqrtN(), 9) == [0, 3, 6] and kept(SqrtN(), 10) == [0, 4, 8]
    assert kept(MaxBytes(100), 4, costs=[1, 8, 4, 9], bytes=[10, 80, 20, 90]) == [0, 2]
    assert kept(MaxBytes("1KiB"), 3, bytes=[600, 600, 400]) == [0, 2]


def test_uniform_segments() -> None:
    assert Uniform(2).segments(10) == [Segment(0, 4), Segment(5, 9)]
    assert Uniform(3).segments(10) == [Segment(0, 2), Segment(3, 5), Segment(6, 9)]
    assert kept(Uniform(2), 10) == [4] and kept(Uniform(3), 10) == [2, 5]
    assert Uniform(1).decide(8) == [True] * 8
    for policy, n in ((Uniform(2), 0), (Uniform(0), 5), (Uniform(6), 5)):
        assert policy.decide(n) == [False] * n and policy.segments(n) == []


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_they_go_through_json_and_are_frozen(policy: Policy) -> None:
    assert Policy.from_json(policy.to_json()) == policy
    assert eval(str(policy), vars(lowtide.policies)) == policy  # prints as it is written
    assert hash(policy) == hash(Policy.from_json(policy.to_json()))


@pytest.mark.parametrize(
    "text", ["", "{}", '{"policy": "Every"}', '{"policy": "EveryN", "m": 3}', "[1]", '{"policy": "EveryN", "n": -1}']
)
def test_bad_json(text: str) -> None:
    with pytest.raises(ValueError, match="not a policy"):
        Policy.from_json(text)


@given(st.sampled_from(POLICIES), st.integers(0, 40))
def test_one_layer_agrees_with_all(policy: Policy, n: int) -> None:
    decisions = policy.decide(n, [float(i) for i in range(n)], [100] * n)
    assert len(decisions) == n
    assert plan_recomputation(n, policy, [float(i) for i in range(n)], [100] * n) == decisions
    if isinstance(policy, Selective | MaxBytes):
        if n:
            with pytest.raises(ValueError, match="decides by"):
                policy.should_checkpoint(0, n)
        return
    assert [policy.should_checkpoint(i, n) for i in range(n)] == decisions
    try:
        assert [policy.should_checkpoint(i) for i in range(n)] == decisions
    except TypeError as error:
        assert "how many layers" in str(error)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="overlap"):
        Segments((Segment(0, 3), Segment(3, 5)))
    with pytest.raises(ValueError, match="not from 4 to 2"):
        Segment(4, 2)
    with pytest.raises(ValueError, match="whole number"):
        EveryN(-1)
    with pytest.raises(ValueError, match=r"decides by costs: give costs=\[\.\.\.\], a value for each of the 3 layers"):
        Selective().decide(3)
    with pytest.raises(ValueError, match="decides by bytes"):
        MaxBytes(3).decide(3)
    with pytest.raises(ValueError, match="layer 7 is not one of 5 layers"):
        Uniform(2).should_checkpoint(7, 5)
    with pytest.raises(ValueError, match="2 values for 3 layers"):
        Selective().decide(3, costs=[1, 2])
    with pytest.raises(ValueError, match="number of layers"):
        KeepAll().decide(-1)
    with pytest.raises(TypeError, match="EveryN"):
        plan_recomputation(3, "every 4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one slot"):
        Revolve(0)
    with pytest.raises(UnitError):
        MaxBytes("12 apples")
    with pytest.raises(TypeError, match=r"Segments takes a list of Segment\(start, end\); \(0, 3\) is none"):
        Segments([(0, 3)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not Segment\(start=0, end=3\)"):
        Segments(Segment(0, 3))  # type: ignore[arg-type]
    for make in (lambda: Segment(0, 2.5), lambda: Revolve("3"), lambda: Uniform(True)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="whole number"):
            make()
    for threshold in ("100", float("nan")):
        with pytest.raises(ValueError, match="Selective takes a number"):
            Selective(threshold)  # type: ignore[arg-type]
    for policy in (KeepAll(), RecomputeAll(), EveryN(2), Segments((Segment(0, 9),))):
        with pytest.raises(ValueError, match="layer 7 is not one of 5 layers"):
            policy.should_checkpoint(7, 5)
    for bad in (float("nan"), -1):
        with pytest.raises(ValueError, match="0 or more; layer 2 has"):
            MaxBytes(3).decide(3, [1, 2, bad], [1, 1, 1])


@cache
def fewest_advances(n: int, slots: int) -> int:
    """By dynamic programming, independently of the closed form: going back through `n` layers with `slots` states."""
    if n <= 1:
        return 0
    if slots == 1:
        return n * (n - 1) // 2
    return min(j + fewest_advances(n - j, slots - 1) + fewest_advances(j, slots) for j in range(1, n))


@pytest.mark.parametrize("slots", range(1, 7))
def test_revolves_closed_form_is_the_optimum(slots: int) -> None:
    for n in range(1, 50):
        assert Revolve(slots).num_forwards(n) == 1 + fewest_advances(n, slots)
        assert len(kept(Revolve(slots), n)) <= slots - 1
