"""The eager engine: policies and plans carried out on a live `nn.Module`."""

from lowtide.eager.handle import Applied

__all__ = ["Applied"]
