"""`Ranks`: the processes that run a step together, and how they come to the same decisions.

Ranks that run different steps wait for each other in collectives until a time-out. Peaks, times, free memory and
exceptions differ between ranks, so every decision of `fit` and `compile` that depends on one of them goes through
`Ranks`: a number is reduced over all ranks (`min`, `max`), taken from the lowest rank (`first`), or a whole
computation runs on the lowest rank only and its result is sent to the others (`made_by_first`). `together` ends a
block with an exception on all ranks if it raised one on any.

Messages travel in a process group of their own, over gloo on the host. A rank that fails inside a step can therefore
report it although the collectives of the step are incomplete. The other ranks receive the report when their own
collective has timed out, so this group waits for twice the time-out of the group that it accompanies. Every message
names the decision that it belongs to: ranks that are at different points raise `RankError` and do not wait.

`current()` returns the ranks that the running `fit`, `plan` or `fit_pipeline` decides with. Elsewhere it is this
process alone, also in a distributed job, since a rank may trace a model that others do not have. A process alone
sends nothing, and that costs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import distributed

from lowtide import _compat
from lowtide.errors import InfeasibleBudgetError, LowtideError, RankError

T = TypeVar("T")

# Kinds of failures. If ranks fail in different ways, all of them raise the kind that comes last. "waiting" is a
# collective that timed out or lost its connection, mostly since another rank had failed before.
_KINDS = ("waiting", "out of memory", "infeasible", "lowtide", "other")
_OF_COLLECTIVES = ("gloo", "nccl", "timed out", "connection", "collective")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory. cuBLAS raises an error of its own if its workspace does not fit."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "CUBLAS_STATUS_ALLOC_FAILED" in str(error)
    )


class Ranks:
    """The ranks of `group`, a process group for messages between them; None for a process on its own."""

    hidden_from_replay = True

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.size = 1 if group is None else distributed.get_world_size(group)
        self.rank = 0 if group is None else distributed.get_rank(group)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that solves, reads caches and whose times count."""
        return self.rank == 0

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # process groups cannot be copied

    # Numbers and objects.

    def gathered(self, item: T, about: str) -> list[T]:
        """`item` of every rank, in the order of ranks. `about` names the decision, the same on all ranks.

        Raises `RankError` if another rank has failed meanwhile, is at another decision, or does not answer.
        """
        if self.is_alone:
            return [item]
        received = self._exchange(about, item)
        for rank, (_, sent) in enumerate(received):
            if isinstance(sent, _Failure):
                raise _mark_known(RankError(f"rank {rank} failed: {sent.text}"))
        self._check_same_point(received)
        return [sent for _, sent in received]

    def max(self, number: int, about: str) -> int:
        return max(self.gathered(number, about))

    def min(self, number: int, about: str) -> int:
        return min(self.gathered(number, about))

    def any(self, flag: bool, about: str) -> bool:
        return any(self.gathered(flag, about))

    def all(self, flag: bool, about: str) -> bool:
        return all(self.gathered(flag, about))

    def first(self, item: T, about: str) -> T:
        """The lowest rank's item."""
        return item if self.is_alone else self.gathered(item if self.is_first else None, about)[0]  # type: ignore[return-value]

    def made_by_first(self, make: Callable[[], T], about: str) -> T:
        """The result of `make`, which only the lowest rank runs. If it raises there, it raises on all ranks."""
        if self.is_alone:
            return make()
        made: T | None = None
        with self.together(about):
            made = make() if self.is_first else None
        return self.first(made, about)  # type: ignore[return-value]

    # Failures.

    @contextlib.contextmanager
    def together(self, about: str) -> Iterator[None]:
        """A block that succeeds on all ranks or raises on all.

        A rank whose own block raised gets its own exception. The others get `torch.OutOfMemoryError`,
        `InfeasibleBudgetError` or `LowtideError` if another rank raised such an error, and otherwise `RankError`.
        """
        if self.is_alone:
            yield
            return
        try:
            yield
        except Exception as error:
            if not is_known_to_all(error):
                self._end(about, error)
            raise
        else:
            self._end(about, None)

    def _end(self, about: str, own: Exception | None) -> None:
        """Tell the others how a block ended here. Raises unless it ended well everywhere, or `own` is to be raised."""
        received = self._exchange(f"end of {about}", failure := _Failure.of(own))
        failures = {rank: sent for rank, (_, sent) in enumerate(received) if isinstance(sent, _Failure)}
        if not failures:
            self._check_same_point(received)
            return
        kinds = {each.kind for each in failures.values()}
        worst = kind = max(kinds, key=_KINDS.index)
        # Ranks that are still inside the block, or whose collective failed, cannot run the step again.
        if worst == "out of memory" and ("waiting" in kinds or len({name for name, _ in received}) > 1):
            kind = "other"
        if own is not None and failure is not None and failure.kind == kind:
            _mark_known(own)
            return
        rank = min(rank for rank, each in failures.items() if each.kind == worst)
        raise _mark_known(failures[rank].as_error(rank, about, kind)) from own

    # Transport.

    def _exchange(self, about: str, item: Any) -> list[tuple[str, Any]]:
        """Every rank's decision and item."""
        received: list[Any] = [None] * self.size
        try:
            with _compat.without_modes():
                distributed.all_gather_object(received, (about, item), group=self._group)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            text = (
                f"rank {self.rank} waited for the other ranks ({about}), and not all of them answered: a process has "
                f"ended, or runs something else. ({str(error).splitlines()[0][:200]})"
            )
            raise _mark_known(RankError(text)) from error
        return received

    def _check_same_point(self, received: list[tuple[str, Any]]) -> None:
        points = [name for name, _ in received]
        if len(set(points)) > 1:
            other = next(rank for rank, name in enumerate(points) if name != points[self.rank])
            raise _mark_known(
                RankError(
                    f"the ranks do not run the same step: rank {self.rank} is at {points[self.rank]!r}, rank {other} "
                    f"at {points[other]!r}. Call the same functions of lowtide, with the same options, on every rank."
                )
            )


_E = TypeVar("_E", bound=Exception)


def _mark_known(error: _E) -> _E:
    """Mark an exception that all ranks raise or know of, so that outer blocks do not report it again."""
    error.is_known_to_all_ranks = True  # type: ignore[attr-defined]
    return error


def is_known_to_all(error: Exception) -> bool:
    """Whether all ranks raise this exception, or one with its text."""
    return getattr(error, "is_known_to_all_ranks", False)


class _Failure:
    """An exception as it is sent to other ranks."""

    def __init__(self, kind: str, text: str, floor_bytes: int = 0) -> None:
        self.kind, self.text, self.floor_bytes = kind, text, floor_bytes

    @classmethod
    def of(cls, error: Exception | None) -> _Failure | None:
        if error is None:
            return None
        text = f"{type(error).__name__}: {str(error)[:2000]}"
        if is_out_of_memory(error):
            return cls("out of memory", text)
        if isinstance(error, InfeasibleBudgetError):
            return cls("infeasible", str(error), error.floor_bytes)
        if isinstance(error, LowtideError) and not isinstance(error, RankError):
            return cls("lowtide", text)
        is_waiting = isinstance(error, RuntimeError) and any(word in text.lower() for word in _OF_COLLECTIVES)
        return cls("waiting" if is_waiting else "other", text)

    def as_error(self, rank: int, about: str, kind: str) -> Exception:
        """The exception that ranks other than `rank` raise."""
        if kind == "out of memory":
            return torch.OutOfMemoryError(f"rank {rank} ran out of memory ({about}): {self.text}")
        if kind == "infeasible":
            return InfeasibleBudgetError(f"on rank {rank}: {self.text}", self.floor_bytes)
        text = f"rank {rank} failed ({about}): {self.text}"
        return LowtideError(text) if kind == "lowtide" else RankError(text)


ALONE = Ranks()
_current: ContextVar[Ranks] = ContextVar("ranks that decide together", default=ALONE)


def is_in_job() -> bool:
    """Whether torch.distributed is initialised in this process."""
    return distributed.is_available() and distributed.is_initialized()


def ranks_of(group: Any = None) -> Ranks:
    """The ranks of a process group, by default all of the job. The first call for a group is itself a collective."""
    if not is_in_job():
        return ALONE
    accompanied = distributed.group.WORLD if group is None else group
    if distributed.get_world_size(accompanied) == 1 or distributed.get_rank(accompanied) < 0:
        return ALONE
    return _with_messages(accompanied, tuple(distributed.get_process_group_ranks(accompanied)))


def ranks_among(members: Iterable[int]) -> Ranks:
    """The ranks with these numbers in the job, this one among them. The first call for them is a collective."""
    return _with_messages(distributed.group.WORLD, tuple(sorted(members)))


@functools.cache
def _with_messages(accompanied: Any, members: tuple[int, ...]) -> Ranks:
    timeout = 2 * _compat.group_timeout(accompanied)
    group = distributed.new_group(list(members), timeout=timeout, backend="gloo", use_local_synchronization=True)
    return Ranks(group)


def current() -> Ranks:
    """The ranks that the running call of `fit` or `plan` decides with."""
    return _current.get()


@contextlib.contextmanager
def deciding_with(ranks: Ranks) -> Iterator[Ranks]:
    """Set `current()` inside the block."""
    token = _current.set(ranks)
    try:
        yield ranks
    finally:
        _current.reset(token)
