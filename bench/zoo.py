"""Models to try things on: small ones of many kinds, some written by others (transformers), all with random weights.

`make(name)` gives a `Job`. `scale` makes a model wider and its batch larger, for a GPU; a scale of 1 is for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint


@dataclass
class Job:
    """What one trains: a model, a loss of a batch, and the modules one would put checkpoints on."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    batch: tuple[Any, ...]
    blocks: str | list[str]

    def step(self) -> None:
        self.loss_fn(*self.batch).backward()


ZOO: dict[str, Callable[[int], Job]] = {}


def job(function: Callable[[int], Job]) -> Callable[[int], Job]:
    ZOO[function.__name__] = function
    return function


def make(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, scale: int = 1) -> Job:
    """The job of that name, on a device, floating-point parameters and inputs in `dtype`."""
    torch.manual_seed(0)
    made = ZOO[name](scale)
    made.model.to(device=device, dtype=dtype).train()
    made.batch = tuple(
        item.to(device, dtype if item.is_floating_point() else item.dtype) if isinstance(item, Tensor) else item
        for item in made.batch
    )
    return made


# Models of our own.


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def gpt(layers: int, width: int = 64, heads: int = 4, vocabulary: int = 256, tokens: tuple[int, int] = (4, 64)) -> Job:
    """A plain GPT of any depth."""
    model = GPT(layers, width, heads, vocabulary, dropout=0.0)
    return _language_job(model, vocabulary, tokens, "layers.*")


def _language_job(model: nn.Module, vocabulary: int, tokens: tuple[int, int], blocks: str) -> Job:
    def loss_fn(ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    return Job(model, loss_fn, (torch.randint(vocabulary, tokens),), blocks)


@job
def gpt_dropout(scale: int) -> Job:
    model = GPT(6 if scale > 1 else 3, 64 * scale, 4, 256, dropout=0.1)
    return _language_job(model, 256, (4, 64 * scale), "layers.*")


@job
def gpt_tied(scale: int) -> Job:
    model = GPT(4, 64 * scale, 4, 256)
    model.head.weight = model.embedding.weight
    return _language_job(model, 256, (4, 64 * scale), "layers.*")


class Repeated(nn.Module):
    """One block called several times, as in ALBERT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block, self.head = Block(width, 4), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


@job
def block_called_again(scale: int) -> Job:
    model = Repeated(64 * scale)
    return Job(model, lambda x: model(x).float().square().mean(), (torch.randn(4, 64 * scale, 64 * scale),), "block")


@job
def gpt_autocast(scale: int) -> Job:
    inner = gpt_dropout(scale)

    def loss_fn(ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16):
            return inner.loss_fn(ids)

    return Job(inner.model, loss_fn, inner.batch, inner.blocks)


class CheckpointedGPT(GPT):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch_checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


@job
def gpt_with_torch_checkpoint(scale: int) -> Job:
    model = CheckpointedGPT(4, 64 * scale, 4, 256)
    return _language_job(model, 256, (4, 64 * scale), "head")


class SquareReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x.relu()


class CustomMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(SquareReLU.apply(self.up(x)))


@job
def custom_function(scale: int) -> Job:
    model = nn.Sequential(*(CustomMLP(64 * scale) for _ in range(5)))
    return Job(model, lambda x: model(x).float().square().mean(), (torch.randn(256 * scale, 64 * scale),), "*")


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@job
def lora(scale: int) -> Job:
    made = gpt_dropout(scale)
    made.model.requires_grad_(False)
    for layer in made.model.layers:
        layer.attention.qkv = LoRALinear(layer.attention.qkv)
        layer.mlp[0] = LoRALinear(layer.mlp[0])
    return made


class ConvBlock(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(ConvBlock(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(ConvBlock(i + o, o) for i, o in zip(widths[::-1], widths[-2::-1], strict=False))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.interpolate(x, scale_factor=2)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            x = F.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, skip], dim=1))
        return self.head(x)


@job
def unet(scale: int) -> Job:
    model = UNet(16 * scale)
    images = torch.randn(2, 3, 32 * scale, 32 * scale)
    return Job(model, lambda x: (model(x) - x).float().square().mean(), (images,), ["down.*", "up.*"])


class LSTMModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(width, width, num_layers=2, batch_first=True), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


@job
def lstm(scale: int) -> Job:
    model = LSTMModel(48 * scale)
    return Job(model, lambda x: model(x).float().square().mean(), (torch.randn(4, 24, 48 * scale),), "lstm")


class Doubled(Tensor):
    """A subclass that wraps another tensor, as quantised and distributed tensors do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Doubled:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], context: None, size: Any, stride: Any) -> Doubled:
        return Doubled(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(item: Any) -> Any:
            if isinstance(item, list | tuple):
                return type(item)(unwrap(each) for each in item)
            return item.inner if isinstance(item, Doubled) else item

        out = func(*unwrap(args), **{key: unwrap(item) for key, item in (kwargs or {}).items()})
        return Doubled(out) if isinstance(out, Tensor) else out


class SubclassInside(nn.Module):
    """Wraps its input on the way in and gives a plain tensor out."""

    class Wrap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return Doubled(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.inner if isinstance(gradient, Doubled) else gradient

    class Unwrap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.inner

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return Doubled(gradient)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.Unwrap.apply(self.Wrap.apply(x).sin().exp().tanh()))


@job
def tensor_subclass(scale: int) -> Job:
    model = nn.Sequential(*(SubclassInside(64 * scale) for _ in range(3)))
    return Job(model, lambda x: model(x).float().square().mean(), (torch.randn(256 * scale, 64 * scale),), "*")


# Models of others.


def _of_transformers(scale: int, kind: str, blocks: str | list[str], config: dict[str, Any], head: str) -> Job:
    import transformers

    transformers.logging.set_verbosity_error()
    batch = max(2, scale // 2)
    model = getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**config))
    if "image_size" in config or kind == "ResNet":
        images = torch.randn(batch, 3, config.get("image_size", 32 * scale), config.get("image_size", 32 * scale))
        return Job(model, lambda x: model(x, labels=x.new_zeros(batch, dtype=torch.long)).loss, (images,), blocks)
    ids = torch.randint(config["vocab_size"], (batch, 64 * scale))
    return Job(model, lambda ids: model(input_ids=ids, labels=ids).loss, (ids,), blocks)


_TEXT = {"vocab_size": 256, "use_cache": False}


@job
def hf_llama(scale: int) -> Job:
    width = {"hidden_size": 64 * scale, "intermediate_size": 128 * scale, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _of_transformers(scale, "Llama", "model.layers.*", _TEXT | width | heads, "LlamaForCausalLM")


@job
def hf_gpt2(scale: int) -> Job:
    config = {"n_embd": 64 * scale, "n_layer": 4, "n_head": 4, "n_positions": 64 * scale}
    return _of_transformers(scale, "GPT2", "transformer.h.*", _TEXT | config, "GPT2LMHeadModel")


@job
def hf_bert(scale: int) -> Job:
    width = {"hidden_size": 64 * scale, "intermediate_size": 128 * scale, "num_hidden_layers": 4}
    config = _TEXT | width | {"num_attention_heads": 4, "max_position_embeddings": 64 * scale}
    return _of_transformers(scale, "Bert", "bert.encoder.layer.*", config, "BertForMaskedLM")


@job
def hf_t5(scale: int) -> Job:
    config = {"d_model": 64 * scale, "d_kv": 16 * scale, "d_ff": 128 * scale, "num_layers": 2, "num_heads": 4}
    made = _of_transformers(
        scale, "T5", ["encoder.block.*", "decoder.block.*"], _TEXT | config, "T5ForConditionalGeneration"
    )
    made.model.config.decoder_start_token_id = 0
    made.model.decoder.config.use_cache = False
    return made


@job
def hf_vit(scale: int) -> Job:
    width = {"hidden_size": 64 * scale, "intermediate_size": 128 * scale, "num_hidden_layers": 4}
    config = width | {"num_attention_heads": 4, "image_size": 32 * scale, "patch_size": 4}
    return _of_transformers(scale, "ViT", "vit.layers.*", config, "ViTForImageClassification")


@job
def hf_resnet(scale: int) -> Job:
    config = {"embedding_size": 16 * scale, "hidden_sizes": [16 * scale, 32 * scale], "depths": [2, 2]}
    return _of_transformers(scale, "ResNet", "resnet.encoder.stages.*", config, "ResNetForImageClassification")


@job
def hf_mixtral(scale: int) -> Job:
    width = {"hidden_size": 64 * scale, "intermediate_size": 64 * scale, "num_hidden_layers": 3}
    config = _TEXT | width | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return _of_transformers(scale, "Mixtral", "model.layers.*", config, "MixtralForCausalLM")
