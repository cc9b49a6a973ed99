"""Train a small language model below the floor of recomputing: `python examples/split_loss.py`."""

import torch
from torch import nn

import lowtide

WORDS, WIDTH, LENGTH = 1000, 16, 128


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids)).cumsum(1)))


torch.manual_seed(0)
model, ids = Model(), torch.randint(0, WORDS, (1, LENGTH))


def loss_fn(ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids).float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


guess = lowtide.estimate(model, loss_fn, ids, split=True)
print(guess)
assert guess.split_floor_bytes is not None
budget = (guess.floor_bytes + guess.split_floor_bytes) // 2
try:
    lowtide.plan(model, loss_fn, ids, budget=budget)
except lowtide.InfeasibleBudgetError as error:
    print(error)

handle = lowtide.fit(model, loss_fn, ids, budget=budget, split=True, tune_s=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = loss_fn(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
print(handle.plan)
assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget
