"""Storage for activations between forward and backward: device, host and disk tiers, copies and codecs.

`activation_store.ActivationStore` is the store, and `offload` puts what autograd saves into one. Inside, `tiers` places
the `storage_units` of a store, `transfer` copies them between device and host, `disk` writes files, and `codecs` encode
values. Nothing here knows of plans.
"""

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
