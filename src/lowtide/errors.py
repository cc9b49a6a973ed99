"""The exceptions that lowtide raises.

LowtideError
├── CaptureError (RuntimeError)         the step cannot be captured as a CUDA graph, or changed after the capture
├── CheckpointError (RuntimeError)      a replay differs from its forward, or a tensor that it reads was changed
├── RankError (RuntimeError)            another rank failed or did not answer, or ranks would decide differently
├── StoreError (RuntimeError)           a value cannot be stored, or cannot be read back unchanged
│   ├── CapacityError                   no tier has room for a value
│   └── ChangedInPlaceError             a value was changed in place after it was stored
├── TraceError (RuntimeError)           the step cannot be traced: no scalar loss, or its ops vary between runs
├── GraphError (ValueError)             a graph is damaged, or its parts contradict each other
├── InfeasibleBudgetError (ValueError)  no plan fits the budget; names the smallest budget that fits, and what fills it
├── PlanError (ValueError)              a plan is damaged, or was made for another step or model
└── UnitError (ValueError)              not a number of bytes: `0.5`, `"12 apples"`, a negative budget

Wrong types and unknown options raise plain `TypeError` and `ValueError`.
"""

from __future__ import annotations


class LowtideError(Exception):
    """Base class of all exceptions that lowtide defines."""


class CaptureError(LowtideError, RuntimeError):
    """A step cannot be captured as a CUDA graph, or changed after the capture; nothing was modified."""


class CheckpointError(LowtideError, RuntimeError):
    """A region could not be replayed as its forward ran; the message names the region, the cause and the fix."""


class RankError(LowtideError, RuntimeError):
    """Another rank of a distributed job failed or did not answer, or the ranks do not run the same step."""


class StoreError(LowtideError, RuntimeError):
    """A value cannot be stored, or cannot be read back unchanged; the message says why and what to do."""


class CapacityError(StoreError):
    """No tier of an `ActivationStore` has room for a value; the message names the sizes. Nothing was lost."""


class ChangedInPlaceError(StoreError):
    """A stored value was changed in place before it was used, which autograd itself would refuse."""


class TraceError(LowtideError, RuntimeError):
    """A step could not be traced; the message says why and what to do. The model is restored."""


class GraphError(LowtideError, ValueError):
    """A graph, or a file of one, is damaged, or its ops, values and calls contradict each other."""


class PlanError(LowtideError, ValueError):
    """A plan, or a file of one, is damaged, or was made for another step or model."""


class UnitError(LowtideError, ValueError):
    """A text or number could not be read as a number of bytes."""


class InfeasibleBudgetError(LowtideError, ValueError):
    """No plan fits the budget. `floor_bytes` is the smallest one with a plan: predicted, or measured by `fit`."""

    def __init__(self, message: str, floor_bytes: int) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.floor_bytes)  # sent to other ranks
