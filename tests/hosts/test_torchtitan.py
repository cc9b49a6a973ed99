"""torchtitan: the override of activation checkpointing on a model on the meta device, and the memory policy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

import lowtide
from hosts import interfaces
from hosts.interfaces import adapter
from lowtide.errors import InfeasibleBudgetError, LowtideError

pytestmark = pytest.mark.usefixtures("quick_fit")


class FlexAttention(nn.Module):
    """As torchtitan's: it needs a mask made from the batch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, **options: Any) -> Tensor:
        assert attention_masks is not None, "a mask of documents is needed"
        return q


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.inner_attention = nn.LayerNorm(32), nn.Linear(32, 96), FlexAttention()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.inner_attention(q, k, v, attention_masks=None, scale=None, enable_gqa=False).flatten(-2)
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Decoder(nn.Module):
    """With the names of torchtitan's decoders."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.tok_embeddings, self.lm_head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleDict({str(n): Block() for n in range(num_layers)})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(x)


def on_meta() -> Decoder:
    with torch.device("meta"):
        return Decoder()


def test_the_override_plans_on_the_meta_device(tmp_path: Path) -> None:
    with adapter("torchtitan") as host:
        target, factory = interfaces.OVERRIDES["lowtide.hosts.torchtitan.budget"]
        assert target is interfaces.ActivationCheckpointing.Config and factory is host.budget
        source = interfaces.ActivationCheckpointing.Config(debug=True)
        options = {"batch_size": 4, "seq_len": 64, "shards": 1}

        def applied(model: nn.Module, **more: Any) -> Any:
            config = factory(source, **{**options, **more})
            assert config.debug
            host.LowtideAC(config).apply(model)
            return lowtide.handle_of(model)

        model = on_meta()
        num = sum(parameter.numel() for parameter in model.parameters())
        handle = applied(model, budget=16 * num + 600 * 1024)
        assert handle.plan.regions and list(model.state_dict()) == list(Decoder().state_dict())
        assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
        # Half of the static memory on each of two ranks leaves more for activations.
        assert applied(on_meta(), budget=8 * num + 600 * 1024, shards=2).plan.slowdown <= handle.plan.slowdown
        with pytest.raises(InfeasibleBudgetError, match="the shards of parameters, gradients and optimizer state"):
            applied(on_meta(), budget=8 * num)

        # A plan from a file, for a stage of a pipeline, of which no step can be traced alone.
        stage = on_meta()
        stage.lm_head = None  # type: ignore[assignment]
        with pytest.raises(LowtideError, match=r"is a stage of a pipeline, .* \{\"plan\": \"plan.json\"\}"):
            applied(stage)
        (tmp_path / "plan.json").write_text(handle.plan.to_json())
        assert applied(on_meta(), plan=str(tmp_path / "plan.json")).plan.regions == handle.plan.regions


@pytest.mark.parametrize(
    "option", [{"batch_size": 0}, {"seq_len": "2048"}, {"shards": -1}, {"dtype": "bf16"}, {"plan": "missing.json"}]
)
def test_a_wrong_option_is_refused_when_the_job_is_configured(option: dict[str, Any]) -> None:
    with adapter("torchtitan") as host:
        source = interfaces.ActivationCheckpointing.Config()
        with pytest.raises(ValueError, match=f"^{next(iter(option))} is "):
            host.budget(source, **option)


def test_the_policy_marks_the_nodes_of_a_joint_graph() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
    names = [name for name, _ in layers.named_parameters()]

    def step(x: Tensor, *parameters: Tensor) -> Any:
        loss = torch.func.functional_call(layers, dict(zip(names, parameters, strict=True)), (x,)).square().mean()
        return loss, torch.autograd.grad(loss, parameters)

    def traced() -> Any:
        inputs = torch.randn(256, 16), *layers.parameters()
        gm = make_fx(step, tracing_mode="fake")(*inputs)
        last = next(node for node in gm.graph.nodes if "mean" in str(node.target))
        is_backward = False
        for node in gm.graph.nodes:
            node.meta["autograd_backward"] = is_backward
            is_backward = is_backward or node is last
        return gm, inputs

    def saved_bytes(gm: Any) -> int:
        marked = [node for node in gm.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
        return sum(node.meta["val"].nbytes for node in marked if isinstance(node.meta["val"], Tensor))

    with adapter("torchtitan") as host:
        assert interfaces.POLICIES["lowtide"].__name__ == "memory_policy"
        held = sum(3 * parameter.nbytes for parameter in layers.parameters()) + 3 * 256 * 16 * 4
        sizes = []
        for budget in (400 * 1024, 300 * 1024):
            gm, inputs = traced()
            expected = gm(*inputs)
            config = SimpleNamespace(activation_checkpoint=host.LowtideAC.Config(budget=held + budget))
            assert host.memory_policy(gm, config=config) is gm
            marked = [node for node in gm.graph.nodes if "recompute" in node.meta]
            assert marked and not any(node.meta["autograd_backward"] for node in marked)
            assert torch.equal(gm(*inputs)[0], expected[0])
            sizes.append(saved_bytes(gm))
        assert sizes[1] < sizes[0]
        with pytest.raises(LowtideError, match=r"takes its budget from the override: add --override\.imports"):
            host.memory_policy(gm, config=SimpleNamespace(activation_checkpoint=None))
