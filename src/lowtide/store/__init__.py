"""Where activations live: tiers, copies, codecs, disk. Knows nothing of plans."""

from lowtide.store.activation_store import ActivationStore, Missing
from lowtide.store.codecs import CODECS, LOSSY_CODECS

__all__ = [
    "CODECS",
    "LOSSY_CODECS",
    "ActivationStore",
    "Missing",
]
