"""What lowtide raises.

LowtideError
├── CaptureError (RuntimeError)      a step that no CUDA graph can hold, or a graph that no longer fits its model
├── CheckpointError (RuntimeError)   a replay that is not its forward: it diverged, or something it reads was changed
├── StoreError (RuntimeError)        a stored value cannot be written, or not be had again as it was
│   ├── CapacityError                no tier has room for a value
│   └── ChangedInPlaceError          a value was changed in place after it was stored
├── TraceError (RuntimeError)        a step that cannot be traced: no scalar loss, another step each time
├── GraphError (ValueError)          a graph that is damaged, or no step that can have run
├── InfeasibleBudgetError (ValueError)  no plan fits; it names the smallest budget that would do, and what fills it
├── PlanError (ValueError)           a plan that is damaged, or made for another step
└── UnitError (ValueError)           bytes that cannot be read: `0.5`, `"12 apples"`, a negative budget

Wrong types and unknown options are plain `TypeError` and `ValueError`, as elsewhere in Python.
"""

from __future__ import annotations


class LowtideError(Exception):
    """The base of everything lowtide raises on its own account."""


class CaptureError(LowtideError, RuntimeError):
    """A step cannot be captured as a CUDA graph, or changed since; the message says what to do. All is as before."""


class CheckpointError(LowtideError, RuntimeError):
    """A region could not be replayed as its forward ran; the message names the region, the cause and the cure."""


class StoreError(LowtideError, RuntimeError):
    """A value could not be stored, or cannot be given back as it was; the message says why and what to do."""


class CapacityError(StoreError):
    """No tier of an `ActivationStore` has room for a value; the message names the sizes. Nothing was lost."""


class ChangedInPlaceError(StoreError):
    """A stored value was changed in place before it was used, which autograd itself would refuse."""


class TraceError(LowtideError, RuntimeError):
    """A step could not be traced; the message says what was found and what to do. The model is as it was."""


class GraphError(LowtideError, ValueError):
    """A graph, or a file of one, that is damaged or describes no step that can have run."""


class PlanError(LowtideError, ValueError):
    """A plan, or a file of one, that is damaged or does not belong to the step or model it is used with."""


class UnitError(LowtideError, ValueError):
    """A number of bytes could not be read."""


class InfeasibleBudgetError(LowtideError, ValueError):
    """No plan fits the budget. `floor_bytes` is the smallest budget that a plan was found for."""

    def __init__(self, message: str, floor_bytes: int) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes
