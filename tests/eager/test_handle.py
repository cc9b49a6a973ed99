"""`lowtide.apply`: a policy in place, exact, reversible, and invisible otherwise."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import ActivationStore, EveryN, KeepAll, MaxBytes, RecomputeAll, SqrtN
from lowtide.errors import CapacityError
from lowtide.policies import Segment, Segments
from lowtide.tracing.model_blocks import find_regions, matches
from stepping import assert_same
from stepping import run_step as run_plain_step


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def step(policy: Any, **options: Any) -> Any:
    """A step for `run_step`: under a policy, or plainly for None."""

    def run(_: Any, model: nn.Module, inputs: Any) -> Tensor:
        if policy is not None:
            lowtide.apply(model, policy, **options)
        return model(inputs[0])

    return run


@pytest.mark.parametrize("policy", [KeepAll(), RecomputeAll(), EveryN(2), SqrtN(), Segments((Segment(1, 3),))], ids=str)
@pytest.mark.parametrize("with_store", [False, True])
def test_exact(policy: Any, with_store: bool) -> None:
    model, inputs = Model(), [torch.randn(32, 8, requires_grad=True)]
    options = {"store": ActivationStore(host="1GiB")} if with_store else {}
    plain = run_plain_step(step(None), model, inputs, None)  # type: ignore[arg-type]
    ours = run_plain_step(step(policy, **options), model, inputs, None)  # type: ignore[arg-type]
    assert_same(plain, ours)


def test_nothing_else_changes() -> None:
    model = Model()
    before = (repr(model), list(model.state_dict()), [name for name, _ in model.named_modules()])
    fired: list[str] = []
    model.blocks[1].register_forward_hook(lambda *args: fired.append("forward"))
    model.blocks[1].register_full_backward_hook(lambda *args: fired.append("backward"))
    handle = lowtide.apply(model, RecomputeAll())
    assert (repr(model), list(model.state_dict()), [name for name, _ in model.named_modules()]) == before
    assert isinstance(model.blocks[0], Block) and type(model.blocks[0]) is Block
    model(torch.randn(4, 8)).sum().backward()
    assert fired == ["forward", "backward"]  # hooks are outside of the region
    handle.remove()
    assert "forward" not in vars(model.blocks[0])


def test_stats_are_measured() -> None:
    model = Model()
    handle = lowtide.apply(model, EveryN(3))
    x = torch.randn(32, 8)
    model(x).sum().backward()
    stats = handle.stats()
    assert stats.num_regions == 6 and stats.num_recomputed == 4 and stats.num_replays == 4
    per_block = stats.regions[0].saved_bytes
    assert per_block >= 32 * (16 + 32) * 4 and all(region.saved_bytes == per_block for region in stats.regions)
    assert stats.kept_bytes == 2 * per_block and stats.recomputed_bytes == 4 * per_block
    model(x[:16]).sum().backward()
    assert handle.stats().num_replays == 8 and handle.stats().kept_bytes < stats.kept_bytes
    assert "6 regions, 4 recomputed" in str(handle.stats()) and "EveryN(n=3) on 6 regions (on)" in str(handle)


def replays(model: nn.Module, handle: Any) -> int:
    before = handle.stats().num_replays
    output = model(torch.randn(4, 8))
    if output.requires_grad:
        output.sum().backward()
    return handle.stats().num_replays - before


def test_switching_and_removing() -> None:
    model = Model()
    handle = lowtide.apply(model, RecomputeAll())
    assert replays(model, handle) == 6
    handle.enabled = False
    assert replays(model, handle) == 0
    handle.enabled = True
    with handle.disabled():
        assert replays(model, handle) == 0
    assert replays(model, handle) == 6
    with torch.no_grad():
        assert replays(model, handle) == 0
    assert replays(model.eval(), handle) == 6
    output = model(torch.randn(4, 8))
    handle.remove()
    output.sum().backward()  # a graph from before still runs
    assert replays(model, handle) == 0
    with lowtide.apply(model, RecomputeAll()) as second:
        assert replays(model, second) == 6
    assert replays(model, second) == 0


def test_a_removed_policy_replays_layers_inside_layers() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    reference = copy.deepcopy(model)
    handle = lowtide.apply(model, RecomputeAll(), regions=["*", "*.*"])
    x = torch.randn(4, 8)
    loss = model(x).sum()
    handle.remove()
    loss.backward()
    reference(x).sum().backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(ours.grad, plain.grad) for ours, plain in pairs)
    assert all("forward" not in vars(module) for module in model.modules())


def test_copies_and_pickles() -> None:
    model = Model()
    handle = lowtide.apply(model, RecomputeAll())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1)
    x = torch.randn(4, 8)
    copied.eval(), model.eval()
    assert not torch.equal(copied(x), model(x))  # runs its own weights
    assert replays(copied, handle) == 6
    loaded = pickle.loads(pickle.dumps(model)).eval()
    assert torch.equal(loaded(x), model(x))
    assert replays(loaded, handle) == 0
    handle.remove()
    assert torch.equal(pickle.loads(pickle.dumps(model)).eval()(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_under_torch_compile() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    x = torch.randn(4, 8, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    lowtide.apply(model, RecomputeAll(), regions="*")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    (ours,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(ours, plain)


def test_someone_elses_forward_is_kept() -> None:
    model = Model()
    calls: list[int] = []
    own = model.blocks[0].forward

    @functools.wraps(own)
    def patched(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return own(*args, **kwargs)

    model.blocks[0].forward = patched
    handle = lowtide.apply(model, RecomputeAll())
    assert replays(model, handle) == 6 and calls == [1, 1]
    handle.remove()
    assert model.blocks[0].forward is patched


def test_a_layers_own_arguments_may_have_the_names_of_options() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, *, store: float, debug: Tensor, function: str = "sin") -> Tensor:
            return getattr(torch, function)(self.linear(x) * store + debug)

    model, x = nn.ModuleList(Odd() for _ in range(3)), torch.randn(4, 8, requires_grad=True)

    def run() -> Tensor:
        h = x
        for layer in model:
            h = layer(h, store=2.0, debug=torch.ones(8), function="tanh")
        return torch.autograd.grad(h.sum(), x)[0]

    plain = run()
    with lowtide.apply(model, RecomputeAll()) as handle:
        assert torch.equal(run(), plain) and handle.stats().num_replays == 3


def test_limits_on_inputs_held() -> None:
    model = Model()
    handle = lowtide.apply(model, RecomputeAll(), max_checkpoints=2)
    assert replays(model, handle) == 2
    handle.remove()
    store = ActivationStore(host="1MiB")
    handle = lowtide.apply(model, RecomputeAll(), store=store, max_checkpoints=4)
    output = model(torch.randn(4, 8)).sum()
    assert len(store) == 4 and handle.stats().stored_bytes == store.stats().held_bytes > 0
    output.backward()
    assert len(store) == 0
    handle.remove()
    lowtide.apply(model, RecomputeAll(), store=ActivationStore(host=600))
    with pytest.raises(CapacityError):
        model(torch.randn(4, 8))


def test_options_that_are_none() -> None:
    with pytest.raises(ValueError, match="max_checkpoints is a number of layers"):
        lowtide.apply(Model(), RecomputeAll(), max_checkpoints=-1)
    with pytest.raises(TypeError, match="not 3"):
        lowtide.apply(Model(), RecomputeAll(), regions=3)  # type: ignore[arg-type]


# Regions


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.layers = nn.ModuleList(Block() for _ in range(4))
        self.decoder.layers = nn.Sequential(*(nn.TransformerDecoderLayer(16, 2, 16) for _ in range(3)))
        self.classifier = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))


class Residual(nn.Module):
    """Stages of blocks, and experts inside of blocks, which are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(*(Block() for _ in range(2)))
        self.stage2 = nn.Sequential(*(Block() for _ in range(5)))
        for block in self.stage2:
            block.experts = nn.ModuleList(Block() for _ in range(8))


def test_repeated_blocks_are_found() -> None:
    assert list(find_regions(Model(), None)) == [f"blocks.{i}" for i in range(6)]
    both = [f"encoder.layers.{i}" for i in range(4)] + [f"decoder.layers.{i}" for i in range(3)]
    assert list(find_regions(EncoderDecoder(), None)) == both
    stages = ["stage1.0", "stage1.1", *(f"stage2.{i}" for i in range(5))]
    assert list(find_regions(Residual(), None)) == stages


def stack(kind: Callable[[], nn.Module], num: int) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(num))


def holding(**children: nn.Module) -> nn.Module:
    """A module of a class of its own that holds these."""
    parent = type("Holder", (nn.Module,), {})()
    for name, child in children.items():
        parent.add_module(name, child)
    return parent


class FourLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))


class Experts(FourLinears):
    def __init__(self) -> None:
        super().__init__()
        self.experts = stack(FourLinears, 8)


class OwnWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))


class Tower(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(8, 8), nn.Embedding(8, 8)
        self.blocks = nn.Sequential(*stack(FourLinears, num))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 8)


class Convolution(nn.Sequential):
    def __init__(self, width: int, out: int) -> None:
        super().__init__(nn.Conv2d(width, out, 1), nn.BatchNorm2d(out), nn.ReLU())


class Bottleneck(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(Convolution(width, 4), Convolution(4, 4), Convolution(4, out))


class Stage(nn.Module):
    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.downsample = nn.Conv2d(width, width, 2)
        self.blocks = nn.ModuleList([Bottleneck(width, 2 * width)])
        self.blocks.extend(Bottleneck(2 * width, 2 * width) for _ in range(num - 1))


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize(
    ("build", "patterns"),
    [
        (lambda num: nn.Sequential(*stack(FourLinears, num)), ["*"]),
        (lambda num: nn.Sequential(nn.Linear(4, 8), *stack(FourLinears, num), nn.Linear(8, 4)), ["*"]),
        (lambda num: Tower(num), ["blocks.*"]),
        (lambda num: holding(model=Tower(num), head=nn.Linear(8, 8)), ["model.blocks.*"]),
        (lambda num: nn.Sequential(Tower(num), nn.Linear(8, 8)), ["0.blocks.*"]),
        (lambda num: holding(left=Tower(num), right=Tower(num)), ["left.blocks.*", "right.blocks.*"]),
        (lambda num: holding(text=Tower(12), image=Tower(num)), ["text.blocks.*", "image.blocks.*"]),
        (lambda num: nn.Transformer(8, 2, num, num, 8, batch_first=True), ["encoder.layers.*", "decoder.layers.*"]),
        (lambda num: holding(layers=stack(Experts, num)), ["layers.*"]),
        (lambda num: holding(layers=nn.ModuleList([FourLinears(), *stack(Experts, num)])), ["layers.*"]),
        (lambda num: holding(layers=stack(FourLinears, num), heads=stack(lambda: nn.Linear(8, 2), 9)), ["layers.*"]),
        (lambda num: holding(embed=nn.Linear(8, 8), layers=stack(OwnWeight, num)), ["layers.*"]),
        (lambda num: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(num))), ["*"]),
        (lambda num: holding(layers=nn.ModuleDict({f"at{i}": FourLinears() for i in range(num)})), ["layers.at*"]),
        (lambda num: holding(stages=nn.ModuleList(Stage(8 << i, num) for i in range(4))), ["stages.*.blocks.*"]),
        (lambda num: holding(stage1=Stage(8, num), stage2=Stage(16, num)), ["stage*.blocks.*"]),
    ],
)
def test_blocks_of_shallow_models(build: Callable[[int], nn.Module], patterns: list[str], num: int) -> None:
    model = build(num)
    expected = {
        name
        for name, module in model.named_modules()
        if name and any(matches(pattern, name) for pattern in patterns) and not isinstance(module, nn.Linear)
    }
    assert set(find_regions(model, None)) == expected != set()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (holding(block0=FourLinears(), block1=FourLinears(), head=nn.Linear(8, 8)), ["block0", "block1"]),
        (holding(block0=Experts(), block1=Experts()), ["block0", "block1"]),
        (holding(first=FourLinears(), second=FourLinears(), last=holding(a=Block(), b=Block())), ["first", "second"]),
        (holding(layers=stack(FourLinears, 2), pooler=holding(a=Block(), b=Block())), ["layers.0", "layers.1"]),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), ["0", "2"]),
    ],
)
def test_blocks_that_are_attributes_and_layers_without_blocks(model: nn.Module, expected: list[str]) -> None:
    assert list(find_regions(model, None)) == expected


def test_a_block_under_two_names_is_one_block() -> None:
    layers = stack(FourLinears, 3)
    model = holding(first=layers[0], layers=layers, encoder=holding(layers=layers))
    found = list(find_regions(model, None).values())
    assert len(found) == 3 and all(block in found for block in layers)


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama", "T5", "Bart", "Clip", "Llava"])
def test_blocks_are_those_that_hugging_face_checkpoints(name: str, num: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import GradientCheckpointingLayer

    size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": num}
    text, image = {**size, "vocab_size": 9}, {**size, "image_size": 8, "patch_size": 4}
    pair = {
        f"{part}_{key}": value
        for part in ("encoder", "decoder")
        for key, value in (("layers", num), ("attention_heads", 2), ("ffn_dim", 16))
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    models = {
        "Bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**text)),
        "GPT2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_head=2, n_layer=num, vocab_size=9, **tokens)
        ),
        "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**text)),
        "T5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=num, num_heads=2, vocab_size=9)
        ),
        "Bart": lambda: transformers.BartForConditionalGeneration(
            transformers.BartConfig(d_model=16, vocab_size=9, **pair)
        ),
        "Clip": lambda: transformers.CLIPModel(
            transformers.CLIPConfig(text_config={**text, **tokens}, vision_config=image)
        ),
        "Llava": lambda: transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                text_config=transformers.LlamaConfig(**text), vision_config=transformers.CLIPVisionConfig(**image)
            )
        ),
    }
    model = models[name]()
    theirs = [path for path, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    assert list(find_regions(model, None)) == theirs != []


@pytest.mark.parametrize(
    ("regions", "expected"),
    [
        ("blocks.*", 6),
        ("blocks.[12]", 2),
        ("**.up", 6),
        ("head", 1),
        (Block, 6),
        ([Block, "head"], 7),
        (lambda name, module: name.endswith("0"), 2),
    ],
)
def test_regions_by_pattern_class_and_predicate(regions: Any, expected: int) -> None:
    assert len(find_regions(Model(), regions)) == expected


def test_patterns_match_components_not_substrings() -> None:
    assert not matches("layers.1", "layers.10") and not matches("layer*", "layers.1")
    assert matches("layers.1*", "layers.10") and matches("**", "a.b.c") and matches("a.**.c", "a.c")


def test_no_match_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'layers\.\*' matches no module.*6 x Block \(blocks\.0\)"):
        lowtide.apply(Model(), KeepAll(), regions="layers.*")
    with pytest.raises(ValueError, match="no repeated blocks"):
        lowtide.apply(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), KeepAll())
    with pytest.raises(TypeError, match="patterns, module classes and predicates"):
        lowtide.apply(Model(), KeepAll(), regions=[3])  # type: ignore[list-item]


# Refusals


def test_what_is_refused() -> None:
    model = Model()
    handle = lowtide.apply(model, KeepAll())
    with pytest.raises(lowtide.LowtideError, match=r"blocks\.0 already: handle\.remove\(\)"):
        lowtide.apply(model, EveryN(2))
    handle.remove()
    lowtide.apply(model, EveryN(2)).remove()
    model.blocks[2].gradient_checkpointing = True
    with pytest.raises(lowtide.LowtideError, match="gradient_checkpointing_disable"):
        lowtide.apply(model, EveryN(2))
    with pytest.raises(lowtide.LowtideError, match="DistributedDataParallel"):
        lowtide.apply(nn.DataParallel(Model()), EveryN(2))
    with pytest.raises(TypeError, match="EveryN"):
        lowtide.apply(Model(), 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"nn\.Module"):
        lowtide.apply(lambda x: x, EveryN(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="decides by bytes"):
        lowtide.apply(Model(), MaxBytes(100))
    assert "forward" not in vars(Model().blocks[0])
    with lowtide.apply(Model(), MaxBytes(100), bytes=[60] * 6) as handle:
        assert handle.stats().num_recomputed == 5


def test_torchs_wrapper_is_refused() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(Block()), checkpoint_wrapper(Block()))
    with pytest.raises(lowtide.LowtideError, match="checkpoint_wrapper already"):
        lowtide.apply(model, EveryN(2))


def test_a_patched_forward_looks_like_the_one_it_replaces() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
            """Scales."""
            return x * scale

    def patched_by_someone(x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x

    model = nn.Sequential(Layer(), Layer(), Layer())
    model[1].forward = patched_by_someone
    before = [inspect.signature(layer.forward) for layer in model]
    with lowtide.apply(model, RecomputeAll(), regions=Layer):
        assert [inspect.signature(layer.forward) for layer in model] == before
        assert model[0].forward.__name__ == "forward"
        assert model[0].forward.__doc__ == "Scales."
        assert model[0].forward.__wrapped__ is Layer.forward
        assert model[0].forward.__annotations__ == Layer.forward.__annotations__
        assert model[1].forward.__wrapped__ is patched_by_someone


def test_generate_on_padded_input_gives_the_same_tokens() -> None:
    """Hugging Face looks at the signature of `forward` to know whether it takes position ids."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, vocab_size=64)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    plan = lowtide.plan(model, lambda ids: model(input_ids=ids, labels=ids).loss, ids, budget="1GiB")
    plan = replace(plan, regions=(lowtide.plans.Recompute(""), lowtide.plans.Recompute("transformer.h.0")))
    with lowtide.apply(model, plan):
        assert torch.equal(model.generate(ids, **options), expected)


class Coded(nn.Module):
    """Reads a buffer of a size that regions copy whether forwards write it or not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("code", torch.randn(560, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) + self.code.mean(0)


@pytest.mark.usefixtures("one_thread")
def test_copies_of_buffers_end_with_the_handle_and_count_for_every_candidate() -> None:
    model, x = nn.Sequential(*(Coded() for _ in range(6))), torch.randn(2048, 32)
    fresh = copy.deepcopy(model)

    def copies() -> list[Tensor]:
        known = {id(buffer) for each in (model, fresh) for buffer in each.buffers()}
        alive = [each for each in gc.get_objects() if type(each) is Tensor and each.shape == model[0].code.shape]
        return [each for each in alive if id(each) not in known]

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    plain = lowtide.simulator.simulate(lowtide.trace(model, loss_fn, x)).peak_bytes
    with lowtide.fit(model, loss_fn, x, budget=int(0.85 * plain)) as handle:
        assert handle.plan.regions and len(handle.candidates) > 1
    assert not copies()
    own = x.nbytes + sum(each.nbytes for each in [*fresh.parameters(), *fresh.buffers()])
    with lowtide.apply(fresh, handle.plan):
        peak = own + lowtide.measure(lambda: fresh(x).square().mean().backward(), device="cpu").peak_bytes
    assert handle.measured_peak_bytes == pytest.approx(peak, rel=0.01)
