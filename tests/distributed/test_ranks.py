"""The messages between ranks: reductions, and failures that end on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed

from distributed.jobs import Raised, rank, run_ranks, succeeded
from lowtide.distributed.ranks import ALONE, current, deciding_with, ranks_of
from lowtide.errors import InfeasibleBudgetError, LowtideError, RankError


def test_a_process_on_its_own_decides_alone() -> None:
    assert ranks_of() is ALONE and current() is ALONE and ALONE.is_first
    assert ALONE.min(3, "x") == 3 and ALONE.gathered("item", "x") == ["item"]
    assert ALONE.made_by_first(lambda: 5, "x") == 5
    with pytest.raises(KeyError), ALONE.together("x"):
        raise KeyError("own")


def outcome(function: Callable[[], Any]) -> str:
    try:
        return str(function())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def failing_on(failing: int, error: Exception, *, nested: bool = False) -> Callable[[], str]:
    ranks = ranks_of()

    def run() -> str:
        with ranks.together("outer"), ranks.together("block"):
            if rank() == failing:
                raise error
            if nested:
                ranks.max(1, "a number inside")
        return "fine"

    return run


def many_decisions() -> dict[str, Any]:
    ranks = ranks_of()
    assert ranks is ranks_of() and ranks.size == 2
    found = {
        "numbers": (ranks.min(rank(), "n"), ranks.max(rank(), "n"), ranks.first(rank() + 5, "n")),
        "flags": (ranks.any(rank() == 1, "f"), ranks.all(rank() == 1, "f")),
        "made": ranks.made_by_first(lambda: f"by rank {rank()}", "m"),
        "objects": ranks.gathered({"rank": rank()}, "o"),
        "fine": outcome(failing_on(-1, KeyError())),
        "memory": outcome(failing_on(1, torch.OutOfMemoryError("full"))),
        "infeasible": outcome(failing_on(0, InfeasibleBudgetError("too small", 123))),
        "own": outcome(failing_on(1, LowtideError("no such module"))),
        "other": outcome(failing_on(0, KeyError("wrong key"))),
        "inside": outcome(failing_on(1, KeyError("wrong key"), nested=True)),
        "memory inside": outcome(failing_on(1, torch.OutOfMemoryError("full"), nested=True)),
        "apart": outcome(lambda: ranks.max(1, f"decision of rank {rank()}")),
        "made raises": outcome(lambda: ranks.made_by_first(lambda: 1 // 0, "m")),
    }
    with deciding_with(ranks):
        found["current"] = current() is ranks
    part = distributed.new_group([0])
    found["part"] = ranks_of(part) is ALONE
    return found


@pytest.fixture(scope="module")
def decisions() -> list[dict[str, Any]]:
    return succeeded(run_ranks(many_decisions))


def test_all_ranks_get_the_same_numbers(decisions: list[dict[str, Any]]) -> None:
    for found in decisions:
        assert found["numbers"] == (0, 1, 5) and found["flags"] == (True, False)
        assert found["made"] == "by rank 0" and found["objects"] == [{"rank": 0}, {"rank": 1}]
        assert found["current"] and found["part"] and found["fine"] == "fine"


@pytest.mark.parametrize(
    ("name", "failing", "own", "other"),
    [
        ("memory", 1, "OutOfMemoryError: full", "OutOfMemoryError: rank 1 ran out of memory (block)"),
        ("infeasible", 0, "InfeasibleBudgetError: too small", "InfeasibleBudgetError: on rank 0: too small"),
        ("own", 1, "LowtideError: no such module", "LowtideError: rank 1 failed (block): LowtideError: no such module"),
        ("other", 0, "KeyError: 'wrong key'", "RankError: rank 0 failed (block): KeyError: 'wrong key'"),
        ("inside", 1, "KeyError: 'wrong key'", "RankError: rank 1 failed: KeyError: 'wrong key'"),
        ("memory inside", 1, "RankError: rank 1 failed", "RankError: rank 1 failed: OutOfMemoryError"),
        ("made raises", 0, "ZeroDivisionError", "RankError: rank 0 failed (m): ZeroDivisionError"),
    ],
)
def test_a_failure_of_one_rank_ends_all(
    decisions: list[dict[str, Any]], name: str, failing: int, own: str, other: str
) -> None:
    assert decisions[failing][name].startswith(own)
    assert decisions[1 - failing][name].startswith(other)


def test_ranks_at_different_points_do_not_wait(decisions: list[dict[str, Any]]) -> None:
    for number, found in enumerate(decisions):
        assert found["apart"].startswith("RankError: the ranks do not run the same step")
        assert f"rank {number} is at 'decision of rank {number}'" in found["apart"]


def dying_rank() -> None:
    ranks = ranks_of()
    ranks.max(0, "both are connected")  # else the other rank may still be connecting, and gloo raises
    if rank() == 1:
        os._exit(1)
    ranks.max(1, "a number")


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    survivor, dead = run_ranks(dying_rank, group_s=4)
    assert dead is None and isinstance(survivor, Raised) and survivor.kind == RankError.__name__
    assert "not all of them answered" in survivor.text
