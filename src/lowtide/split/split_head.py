"""`SplitHead`: an output layer between compiled blocks, with its loss in parts, for `lowtide.compile(split=True)`.

Where blocks are compiled one by one, the output layer and the loss run uncompiled after them, so the layer can return
lazy logits as in the eager engine (`split.lazy_logits`). The number of parts follows from the budget, not from a
search: as many as bring the logits of a part, with their float copy and gradients, to a sixteenth of it. Logits that
are that small in one part are left alone, so a budget that needs no split gets none. The trace of the first forward
runs with the split, and the blocks are planned for the memory that it leaves.

A whole compiled graph contains the layer, and often the loss: there `compile` refuses `split=True`.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.graph.step_graph import Split
from lowtide.split.split_forward import SplitForward, why_not_head

logger = logging.getLogger("lowtide")

# Bytes per logit while a part runs, in bfloat16: logits 2, float copy 4, log-softmax 4, gradients 4 and 2.
_BYTES_PER_LOGIT = 16
_SHARE = 16  # the part of the budget that one part of the logits may take
_FEWEST_ROWS = 16


class SplitHead:
    """The patched forward of an output layer, within the budget in bytes that `budget_on` gives for its device.

    `remove()` takes it off.
    """

    hidden_from_replay = True

    def __init__(self, path: str, head: nn.Linear, budget_on: Callable[[torch.device], int]) -> None:
        self.path, self.enabled = path, True
        self._budget_on, self._own = budget_on, vars(head).get("forward")
        self._by_number: dict[int, SplitForward] = {}
        self._head, self._patch = weakref.ref(head), _patched(self)
        head.forward = types.MethodType(self._patch, head)  # type: ignore[method-assign]

    @classmethod
    def on(
        cls, model: nn.Module, blocks: Sequence[nn.Module], budget_on: Callable[[torch.device], int]
    ) -> SplitHead | None:
        """Patch the widest plain linear layer outside of the blocks; None, with a warning, if there is none."""
        if not blocks:
            raise LowtideError(
                "split=True needs blocks that are compiled one by one (regional=True): in one compiled graph, the "
                "output layer is a part of it. Compute the loss by torch.nn.functional.linear_cross_entropy, where "
                "this torch has it, or use lowtide.fit(..., split=True)."
            )
        inside = {module for block in blocks for module in block.modules()}
        heads = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear) and module not in inside and not why_not_head(module, model)
        }
        if not heads:
            logger.warning(
                "split=True: the model has no plain linear layer outside of its compiled blocks, so nothing is split: "
                "leave split out, or use lowtide.fit(..., split=True), which splits layers in blocks too"
            )
            return None
        path = max(heads, key=lambda path: heads[path].out_features)
        return cls(path, heads[path], budget_on)

    @property
    def num_calls(self) -> int:
        """Calls that ran in parts so far."""
        return sum(each.num_calls for each in self._by_number.values())

    def run(self, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of the layer's forward."""
        plain = self._own or functools.partial(type(head).forward, head)
        tokens = args[0] if args else kwargs.get("input")
        if not self.enabled or not isinstance(tokens, Tensor) or not isinstance(head, nn.Linear):
            return plain(*args, **kwargs)
        number = num_parts(tokens.shape[:-1].numel(), head.out_features, self._budget_on(head.weight.device))
        if number == 1:
            return plain(*args, **kwargs)
        runner = self._by_number.setdefault(number, SplitForward(Split(self.path, number)))
        return runner.run(head, plain, *args, **kwargs)

    def remove(self) -> None:
        """Take the patch off. A forward that someone set around it stays, and runs the layer plainly."""
        head = self._head()
        if head is not None and getattr(vars(head).get("forward"), "__func__", None) is self._patch:
            if self._own is None:
                del head.forward
            else:
                head.forward = self._own  # type: ignore[method-assign]
        self.enabled = False


def num_parts(num_rows: int, num_words: int, budget_bytes: int) -> int:
    """The fewest parts, a power of two, of which each takes at most a sixteenth of the budget.

    >>> num_parts(16384, 131072, 24 << 30), num_parts(128, 1000, 24 << 30)
    (32, 1)
    """
    number = 1
    while (
        num_rows * num_words * _BYTES_PER_LOGIT * _SHARE > number * budget_bytes
        and num_rows >= 2 * number * _FEWEST_ROWS
    ):
        number *= 2
    return number


def _patched(split: SplitHead) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return split.run(self, args, kwargs)

    return forward
