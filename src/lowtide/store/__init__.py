"""Storage for activations between forward and backward: device, host and disk tiers, copies and codecs."""

from lowtide.store.activation_store import ActivationStore, Missing
from lowtide.store.codecs import CODECS, LOSSY_CODECS
from lowtide.store.transfer import host_bytes

__all__ = [
    "CODECS",
    "LOSSY_CODECS",
    "ActivationStore",
    "Missing",
    "host_bytes",
]
