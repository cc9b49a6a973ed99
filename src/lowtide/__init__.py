"""lowtide: train inside a memory budget."""

from lowtide.engines.eager import Applied, apply
from lowtide.errors import (
    CapacityError,
    ChangedInPlaceError,
    CheckpointError,
    LowtideError,
    StoreError,
    UnitError,
)
from lowtide.memory.checkpoint import checkpoint
from lowtide.memory.layers import ActivationCheckpointer
from lowtide.memory.offload import offload
from lowtide.memory.region import is_recomputing
from lowtide.memory.store import ActivationStore, Missing
from lowtide.policies import (
    EveryN,
    KeepAll,
    MaxBytes,
    Policy,
    RecomputeAll,
    Revolve,
    Segment,
    Segments,
    Selective,
    SqrtN,
    Uniform,
    plan_recomputation,
)

__all__ = [
    "ActivationCheckpointer",
    "ActivationStore",
    "Applied",
    "CapacityError",
    "ChangedInPlaceError",
    "CheckpointError",
    "EveryN",
    "KeepAll",
    "LowtideError",
    "MaxBytes",
    "Missing",
    "Policy",
    "RecomputeAll",
    "Revolve",
    "Segment",
    "Segments",
    "Selective",
    "SqrtN",
    "StoreError",
    "Uniform",
    "UnitError",
    "apply",
    "checkpoint",
    "is_recomputing",
    "offload",
    "plan_recomputation",
]

__version__ = "0.1.0"
