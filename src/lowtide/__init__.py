"""lowtide: train inside a memory budget."""

from lowtide.errors import (
    CapacityError,
    ChangedInPlaceError,
    CheckpointError,
    LowtideError,
    StoreError,
    UnitError,
)
from lowtide.memory.checkpoint import checkpoint
from lowtide.memory.offload import offload
from lowtide.memory.region import is_recomputing
from lowtide.memory.store import ActivationStore, Missing

__all__ = [
    "ActivationStore",
    "CapacityError",
    "ChangedInPlaceError",
    "CheckpointError",
    "LowtideError",
    "Missing",
    "StoreError",
    "UnitError",
    "checkpoint",
    "is_recomputing",
    "offload",
]

__version__ = "0.1.0"
