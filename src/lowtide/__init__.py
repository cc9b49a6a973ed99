"""lowtide: train inside a memory budget."""

from lowtide.errors import CheckpointError, LowtideError, UnitError
from lowtide.memory.checkpoint import checkpoint
from lowtide.memory.region import is_recomputing

__all__ = [
    "CheckpointError",
    "LowtideError",
    "UnitError",
    "checkpoint",
    "is_recomputing",
]

__version__ = "0.1.0"
