"""A plan on a live `nn.Module`."""

from lowtide.eager.handle import Applied

__all__ = ["Applied"]
