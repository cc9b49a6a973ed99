"""`SplitForward`: the forward of a module that runs in parts, and the three places that put it on a model.

- The eager engine calls `run` in place of a module's own forward, for the splits of a plan.
- `splitting` patches modules while a step is traced: the parts are then ops of the graph, and the solver plans for
  it.
- `SplitHead` patches the output layer for `lowtide.compile(split=True)`, where blocks are compiled one by one and the
  output layer and the loss run uncompiled. The number of parts is the smallest power of two for which the logits of a
  part, with their float copy and gradients, take at most a sixteenth of the budget; smaller logits run whole. The
  first forward is traced with the split, so the blocks are planned for the memory that it leaves. A model compiled as
  one graph contains the layer: `compile` then refuses `split=True`.

A split that cannot be carried out, as the module is called with other arguments or turns out to mix tokens, is logged
once; the module then runs as it is.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.errors import LowtideError, PlanError
from lowtide.graph.step_graph import Split
from lowtide.split import logit_functions as _logit_functions  # noqa: F401  # registers the handlers of lazy logits
from lowtide.split.chunked_loss import HeadCall, row_ranges
from lowtide.split.lazy_logits import LazyLogits
from lowtide.split.token_slices import run_in_slices, values_agree, why_not_row_wise

logger = logging.getLogger("lowtide")

# Bytes per logit while a part runs, in bfloat16: logits 2, float copy 4, log-softmax 4, gradients 4 and 2.
_BYTES_PER_LOGIT = 16
_SHARE = 16  # the part of the budget that one part of the logits may take
_FEWEST_ROWS = 16


class SplitForward:
    """Runs one module in parts. `num_rows` is the number of rows that its last call had in all parts.

    `num_whole` counts calls whose logits were computed in full after all. Nothing is logged if `is_quiet`.
    """

    hidden_from_replay = True

    def __init__(self, split: Split, *, is_checked: bool = False, is_quiet: bool = False) -> None:
        self.split, self.num_rows, self._is_quiet = split, 0, is_quiet
        self.num_calls = self.num_whole = 0
        self._logged: set[str] = set()
        self._is_checked = is_checked  # that the module treats every token alike
        self._refused = ""

    def run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Called in place of `forward`, the module's own, with its arguments."""
        if not torch.is_grad_enabled() or _compat.under_functorch() or torch.compiler.is_compiling() or self._refused:
            return forward(*args, **kwargs)
        tokens = args[0] if len(args) == 1 and not kwargs else kwargs.get("input") if len(kwargs) == 1 else None
        if not isinstance(tokens, Tensor) or tokens.dim() < 2 or not tokens.numel() or not tokens.is_floating_point():
            self._log("it is called with other arguments than one tensor of tokens")
            return forward(*args, **kwargs)
        if len(list(row_ranges(tokens.shape[:-1].numel(), self.split.num_parts))) < 2:
            return forward(*args, **kwargs)  # one part: the plain step, to the bit
        if self.split.kind == "loss" and _compat.has_backward_hooks(module):  # they wait for a gradient of the logits
            self._log("a backward hook is registered on it")
            return forward(*args, **kwargs)
        self.num_calls, self.num_rows = self.num_calls + 1, tokens.shape[:-1].numel()
        if self.split.kind == "loss":
            assert isinstance(module, nn.Linear)
            return LazyLogits.of(HeadCall(module, tokens, self.split.num_parts, self._note_whole))
        if not any(each.requires_grad for each in (tokens, *module.parameters())):
            return forward(*args, **kwargs)
        if not self._is_checked and not self._check(module, forward, tokens):
            return forward(*args, **kwargs)
        return run_in_slices(module, forward, tokens, self.split.num_parts)

    def _note_whole(self, why: str) -> None:
        self.num_whole += 1
        text = f"its output is computed in full, as {why} reads it: that step takes the memory of the whole output"
        self._log(text, about="whole output")

    def _check(self, module: nn.Module, forward: Callable[..., Any], tokens: Tensor) -> bool:
        """Whether the module treats every token alike: the proof, and once real values are there, these too."""
        num_part_rows = next(end for _, end in row_ranges(tokens.shape[:-1].numel(), self.split.num_parts))
        why = why_not_row_wise(module, forward, tokens.shape, tokens.dtype, num_part_rows)
        has_values = type(tokens) in _compat.PLAIN_TYPES and not tokens.is_meta
        if not why and has_values and not values_agree(module, forward, tokens, self.split.num_parts):
            why = "its output for some tokens changes when others are left out"
        if why:
            self._refused = why
            self._log(f"it does not treat every token alike: {why}")
        self._is_checked = has_values
        return not why

    def _log(self, why: str, about: str = "") -> None:
        """Log `why` once, or the first of several reasons `about` the same."""
        if (about or why) not in self._logged and not self._is_quiet:
            self._logged.add(about or why)
            logger.warning("%s is not run in parts: %s", self.split.path or "the model", why)


def why_not_head(module: nn.Module, model: nn.Module) -> str:
    """Why a module of `model` cannot have a lazy output; empty if it can."""
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, not a plain nn.Linear"
    is_sharded = any(_compat.is_sharded(parameter) for parameter in module.parameters())
    if is_sharded and not _compat.stays_gathered(module, model):
        return "its weight is sharded, and not there any more when the loss is computed"
    return ""


def check_splits(model: nn.Module, splits: Sequence[Split]) -> dict[str, nn.Module]:
    """The modules that are to be split, by path. Raises `PlanError` if one cannot be; the model has all of them."""
    modules = {split.path: model.get_submodule(split.path) for split in splits}
    for split in splits:
        if split.kind == "loss" and (why := why_not_head(modules[split.path], model)):
            raise PlanError(f"the plan splits {split.path} as the layer before the loss, and {why}")
    return modules


@contextlib.contextmanager
def splitting(model: nn.Module, splits: Sequence[Split], *, is_quiet: bool = False) -> Iterator[list[SplitForward]]:
    """A context in which the modules run in parts, for a trace. It does not check that they treat tokens alike."""
    runners = [SplitForward(split, is_checked=True, is_quiet=is_quiet) for split in splits]
    modules = check_splits(model, splits)
    with contextlib.ExitStack() as undo:
        for runner in runners:
            module = modules[runner.split.path]
            if "forward" in vars(module):
                undo.callback(setattr, module, "forward", module.forward)
            else:
                undo.callback(delattr, module, "forward")
            module.forward = functools.partial(runner.run, module, module.forward)
        yield runners


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
