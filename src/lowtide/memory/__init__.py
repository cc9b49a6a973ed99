"""What holds, moves and brings back activations. Knows nothing of plans."""

from lowtide.memory.codecs import LOSSY_CODECS

__all__ = ["LOSSY_CODECS"]
