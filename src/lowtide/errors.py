"""What lowtide raises.

LowtideError
├── CheckpointError (RuntimeError)   a replay that is not its forward: it diverged, or something it reads was changed
└── UnitError (ValueError)           bytes that cannot be read: `0.5`, `"12 apples"`, a negative budget

Wrong types and unknown options are plain `TypeError` and `ValueError`, as elsewhere in Python.
"""

from __future__ import annotations


class LowtideError(Exception):
    """The base of everything lowtide raises on its own account."""


class CheckpointError(LowtideError, RuntimeError):
    """A region could not be replayed as its forward ran; the message names the region, the cause and the cure."""


class UnitError(LowtideError, ValueError):
    """A number of bytes could not be read."""
