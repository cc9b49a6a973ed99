"""A layer loop with a backward of its own, in the memory of four states: `python examples/layer_loop.py`."""

import torch

import lowtide

weights = torch.randn(50, 256)


def layer(x: torch.Tensor, i: int) -> torch.Tensor:
    return torch.tanh(x * weights[i])


def layer_backward(x: torch.Tensor, grad: torch.Tensor, i: int) -> torch.Tensor:
    return grad * (1 - torch.tanh(x * weights[i]) ** 2) * weights[i]


policy = lowtide.Revolve(4)
checkpointer = lowtide.ActivationCheckpointer(policy)
output = checkpointer.forward(torch.randn(256), range(50), layer)
grad = checkpointer.backward(torch.ones(256), range(50), layer, layer_backward)
print(checkpointer.stats())
assert checkpointer.stats().num_forwards == policy.num_forwards(50)
