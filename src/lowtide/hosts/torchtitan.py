"""torchtitan: an override of its activation checkpointing, and a memory policy for its graph trainer.

    --override.imports 'lowtide.hosts.torchtitan.budget={"budget": "20GiB", "batch_size": 8, "seq_len": 2048}'

torchtitan applies activation checkpointing to a model on the meta device, after tensor parallelism and before
`torch.compile` and `fully_shard`. There is nothing to measure at that point: the plan comes from a fake trace of a
copy of the model, in the dtype of the computation. Parameters, gradients and optimizer state are counted as this
rank's shards in float32. A plan that was made and measured elsewhere can be given instead: `{"plan": "plan.json"}`.

The graph trainer traces forward and backward into one graph and lets a memory policy mark its nodes. Importing this
module registers the policy "lowtide": use the same override, and `--compile.memory_policy lowtide`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

import lowtide
from lowtide.api.compile import plan_joint_graph
from lowtide.errors import InfeasibleBudgetError, LowtideError
from lowtide.units import check_bytes, check_seconds, format_bytes, parse_bytes


class LowtideAC(ActivationCheckpointing):
    """Recomputes what a plan for `budget` says, in place of one rule for every block."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """`batch_size` is the local one. `shards` is the number of ranks that share the parameters; 0: all ranks."""

        budget: int | str = "80%"
        batch_size: int = 1
        seq_len: int = 2048
        dtype: str = "bfloat16"
        shards: int = 0
        state_bytes: int = 8  # of the optimizer, per parameter: two float32 numbers of AdamW
        plan: str = ""  # a file with a plan, instead of the options above
        time_limit_s: float = 10.0

        def __post_init__(self) -> None:
            check_bytes(self.budget)
            check_seconds(self.time_limit_s, "time_limit_s")
            for name, least in {"batch_size": 1, "seq_len": 1, "shards": 0, "state_bytes": 0}.items():
                value = getattr(self, name)
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise ValueError(f"{name} is a number of at least {least}, not {value!r:.80}")
            dtype = getattr(torch, str(self.dtype), None)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f'dtype is the name of a floating-point dtype, such as "bfloat16", not {self.dtype!r}')
            if self.plan and not Path(self.plan).is_file():
                raise ValueError(f"plan is a file that plan.to_json() was written to, and {self.plan} is none")

    def apply(self, model: nn.Module) -> None:
        """Put the plan on the model, in place."""
        config: Any = self.config
        plan = lowtide.Plan.from_json(Path(config.plan).read_text()) if config.plan else _planned(model, config)
        lowtide.apply(model, plan)


@override(target=ActivationCheckpointing.Config, description="lowtide: activations within a budget")
def budget(cfg: Any, **options: Any) -> Any:
    """The override to name in `--override.imports`; `options` are the fields of `LowtideAC.Config`."""
    return derive(cfg, LowtideAC.Config, **options)


def _planned(model: nn.Module, config: Any) -> lowtide.Plan:
    """A plan from a fake trace of a copy of the model in the dtype of the computation."""
    if getattr(model, "tok_embeddings", None) is None or getattr(model, "lm_head", None) is None:
        raise LowtideError(
            "the model is a stage of a pipeline, without embeddings or without a head: make a plan of the stage with "
            'lowtide.plan, write plan.to_json() to a file, and give {"plan": "plan.json"}'
        )
    copied = _with_traceable_attention(copy.deepcopy(model).to(getattr(torch, config.dtype)))
    tokens = torch.zeros(config.batch_size, config.seq_len, dtype=torch.long, device="meta")

    def loss_fn(tokens: Tensor) -> Tensor:
        return cross_entropy(copied(tokens).flatten(0, 1).float(), tokens.flatten())

    graph = lowtide.trace(copied, loss_fn, tokens, mode="fake")
    total = parse_bytes(config.budget, total_bytes=graph.hardware.memory_bytes or None)
    # In the trace, parameters and gradients are whole and in the dtype of the copy; in training they are shards in
    # float32, with the optimizer's state.
    numbers = sum(parameter.numel() for parameter in model.parameters())
    in_job = torch.distributed.is_available() and torch.distributed.is_initialized()
    shards = config.shards or (torch.distributed.get_world_size() if in_job else 1)
    traced_bytes = 2 * sum(parameter.nbytes for parameter in copied.parameters())
    missing = (4 + 4 + config.state_bytes) * numbers // shards - traced_bytes
    allowed = total - missing
    if allowed <= 0:
        raise InfeasibleBudgetError(
            f"the shards of parameters, gradients and optimizer state take more than the budget of "
            f"{format_bytes(total)}: raise it, or use more ranks",
            missing,
        )
    return lowtide.solve(graph, allowed, time_limit_s=config.time_limit_s)


def _with_traceable_attention(model: nn.Module) -> nn.Module:
    """Replace attention kernels that take masks of documents by torch's own, which saves as many bytes.

    The masks are made from the positions of real batches, and `flex_attention` without the compiler saves other values.
    The replacements keep the names of the classes, by which a plan recognises the model.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            kind = type(child).__name__
            if kind in ("FlexAttention", "VarlenAttention"):
                setattr(module, name, type(kind, (_Attention,), {})())
    return model


class _Attention(nn.Module):
    """Causal attention of heads laid out as torchtitan does: batch, length, heads, width."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: Any = None, enable_gqa: bool = False, **_: Any) -> Any:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)


def memory_policy(gm: Any, *, config: Any) -> Any:
    """Mark the nodes of the graph trainer's joint graph as saved or recomputed, within the budget of the override."""
    own = config.activation_checkpoint
    if not isinstance(own, LowtideAC.Config):
        raise LowtideError(
            "the memory policy takes its budget from the override: add --override.imports "
            """'lowtide.hosts.torchtitan.budget={"budget": "20GiB"}'"""
        )
    inputs = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    held = sum(value.nbytes + value.numel() * own.state_bytes for value in inputs if _is_parameter(value))
    plan_joint_graph(
        gm.graph,
        _total(own.budget, inputs) - held,
        is_backward=lambda node: bool(node.meta.get("autograd_backward")),
        time_limit_s=own.time_limit_s,
    )
    gm.recompile()
    return gm


def _is_parameter(value: Any) -> bool:
    """Whether an input of the graph is a parameter, and not a batch of integers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _total(budget: int | str, inputs: list[Any]) -> int:
    device = next((value.device for value in inputs if isinstance(value, Tensor)), torch.device("cpu"))
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return parse_bytes(budget, total_bytes=total)


def _register_policy() -> None:
    try:
        from torchtitan.experiments.graph_trainer.registry import register_memory_policy
    except ImportError:  # a torchtitan without the graph trainer, or without what it needs
        return
    register_memory_policy("lowtide")(memory_policy)


_register_policy()
