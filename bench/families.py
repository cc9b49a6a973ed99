"""Model families to measure on: random weights, sizes for one H200, and a small sister of each for the CPU.

Each family has a batch at which the device is the limit and one at which the host is. A claim about times should hold
on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import zoo
from torch import Tensor, nn
from zoo import Job


@dataclass(frozen=True)
class Size:
    """How large a family is made: layers, width, batch, and tokens or pixels. `words` are in the vocabulary."""

    layers: int
    width: int
    batch: int
    length: int
    words: int = 32_000


@dataclass(frozen=True)
class Family:
    """A model by its size. `small_batch` is the batch at which the host is the limit.

    With `is_autocast` the weights are float32 and the forward runs under autocast to bf16, on the CPU too.
    """

    make: Callable[[Size], Job]
    device: Size
    cpu: Size
    small_batch: int = 1
    is_autocast: bool = False


FAMILIES: dict[str, Family] = {}


def family(
    device: Size, cpu: Size, small_batch: int = 1, is_autocast: bool = False
) -> Callable[[Callable[[Size], Job]], Callable[[Size], Job]]:
    def add(make: Callable[[Size], Job]) -> Callable[[Size], Job]:
        FAMILIES[make.__name__] = Family(make, device, cpu, small_batch, is_autocast)
        return make

    return add


def make(name: str, device: str, *, small_batch: bool = False) -> Job:
    """The family's step on a device: bf16 on a GPU, float32 on the CPU, unless the family says otherwise."""
    found = FAMILIES[name]
    size = found.device if device == "cuda" else replace(found.cpu, words=512)
    if small_batch and device == "cuda":
        size = replace(size, batch=found.small_batch)
    elif small_batch:
        size = replace(size, batch=1, length=size.length // 2)
    torch.manual_seed(0)
    with torch.device(device):  # weights are made there, and not moved
        job = found.make(size)
    dtype = torch.bfloat16 if device == "cuda" and not found.is_autocast else torch.float32
    if found.is_autocast:
        job.loss_fn = torch.autocast(device, torch.bfloat16)(job.loss_fn)
    job.model.to(device=device, dtype=dtype).train()
    job.batch = tuple(item.to(device, dtype if item.is_floating_point() else item.dtype) for item in job.batch)
    return job


def _transformer(kind: str, head: str, **config: Any) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    _mend_masks_while_capturing()
    return getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**config))


def _mend_masks_while_capturing() -> None:
    """Let transformers make no mask while a stream is capturing that it does not make eagerly.

    Decoders read from the positions whether a batch packs several sequences, and make a mask if they cannot read them;
    these batches pack none. Versions before 5.18 also make a mask for encoders. With a mask attention uses a slower
    kernel, which saves more and draws other random numbers.
    """
    from transformers import __version__, masking_utils

    is_tracing, find_packed = masking_utils.is_tracing, masking_utils.find_packed_sequence_indices
    if getattr(find_packed, "is_mended", False) or not torch.cuda.is_available():
        return

    def find_packed_eagerly(position_ids: Any) -> Any:
        return None if torch.cuda.is_current_stream_capturing() else find_packed(position_ids)

    def is_tracing_values(tensor: Any = None) -> bool:
        return not (tensor is None and torch.cuda.is_current_stream_capturing()) and is_tracing(tensor)

    find_packed_eagerly.is_mended = True  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = find_packed_eagerly
    if tuple(map(int, __version__.split(".")[:2])) < (5, 18):
        masking_utils.is_tracing = is_tracing_values


def _sizes(size: Size, *, heads: int = 0, inner: int = 0) -> dict[str, int]:
    """The keywords that most configs of transformers share; by default heads of 64 and MLPs of four times the width."""
    return {
        "hidden_size": size.width,
        "intermediate_size": inner or 4 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": heads or max(4, size.width // 64),
    }


def _paths(model: nn.Module, kind: str) -> list[str]:
    """Modules of the class with that name: their paths differ between versions of transformers."""
    return [path for path, module in model.named_modules() if type(module).__name__ == kind]


def _language(model: nn.Module, size: Size, blocks: str | list[str]) -> Job:
    ids = torch.randint(size.words, (size.batch, size.length))
    return Job(model, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss, (ids,), blocks)


def _images(model: nn.Module, size: Size, blocks: str) -> Job:
    images = torch.randn(size.batch, 3, size.length, size.length)
    return Job(model, lambda x: model(x).logits.float().square().mean(), (images,), blocks)


@family(device=Size(16, 2048, 8, 2048), cpu=Size(6, 128, 2, 128))
def gpt(size: Size) -> Job:
    return zoo.gpt(size.layers, size.width, max(4, size.width // 128), size.words, (size.batch, size.length))


@family(device=Size(16, 2048, 8, 2048), cpu=Size(6, 128, 2, 128))
def llama(size: Size) -> Job:
    heads = max(4, size.width // 128)
    model = _transformer(
        *("Llama", "LlamaForCausalLM"),
        vocab_size=size.words,
        num_key_value_heads=heads,
        **_sizes(size, heads=heads, inner=11 * size.width // 4),
    )
    return _language(model, size, "model.layers.*")


@family(device=Size(16, 2048, 4, 2048), cpu=Size(6, 128, 2, 128))
def lora(size: Size) -> Job:
    """Rank 16 on every linear layer in the blocks of a frozen Llama."""
    job = llama(size)
    job.model.requires_grad_(False)
    for block in _paths(job.model, "LlamaDecoderLayer"):
        for parent in list(job.model.get_submodule(block).modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, zoo.LoRALinear(child, rank=16))
    return job


@family(device=Size(20, 1536, 4, 2048, words=64_000), cpu=Size(6, 96, 2, 128))
def qwen2(size: Size) -> Job:
    model = _transformer(
        *("Qwen2", "Qwen2ForCausalLM"),
        vocab_size=size.words,
        num_key_value_heads=2,
        **_sizes(size, heads=12, inner=35 * size.width // 6),
    )
    return _language(model, size, _paths(model, "Qwen2DecoderLayer"))


@family(device=Size(18, 1152, 2, 2048, words=64_000), cpu=Size(6, 72, 2, 64))
def gemma2(size: Size) -> Job:
    model = _transformer(
        *("Gemma2", "Gemma2ForCausalLM"),
        vocab_size=size.words,
        **_sizes(size, heads=4, inner=6 * size.width),
        num_key_value_heads=1,
        head_dim=2 * size.width // 9,
        attn_implementation="eager",  # the others leave out the softcapping of attention
    )
    return _language(model, size, _paths(model, "Gemma2DecoderLayer"))


@family(device=Size(24, 1024, 8, 1024, words=50_257), cpu=Size(6, 128, 2, 128), is_autocast=True)
def gpt2(size: Size) -> Job:
    model = _transformer(
        *("GPT2", "GPT2LMHeadModel"),
        vocab_size=size.words,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=max(4, size.width // 64),
        n_positions=size.length,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _language(model, size, _paths(model, "GPT2Block"))


@family(device=Size(24, 1024, 32, 512), cpu=Size(6, 128, 2, 64))
def bert(size: Size) -> Job:
    model = _transformer("Bert", "BertForMaskedLM", vocab_size=size.words, **_sizes(size))
    ids = torch.randint(size.words, (size.batch, size.length))
    return Job(model, lambda ids: model(input_ids=ids, labels=ids).loss, (ids,), "bert.encoder.layer.*")


@family(device=Size(24, 1024, 64, 224), cpu=Size(6, 128, 2, 64), small_batch=8)
def vit(size: Size) -> Job:
    model = _transformer(
        *("ViT", "ViTForImageClassification"),
        **_sizes(size),
        image_size=size.length,
        hidden_dropout_prob=0.1,
    )
    return _images(model, size, "vit.layers.*")


@family(device=Size(27, 128, 64, 224), cpu=Size(6, 16, 2, 64), small_batch=8)
def convnext(size: Size) -> Job:
    model = _transformer(
        *("ConvNext", "ConvNextForImageClassification"),
        depths=[3, 3, size.layers, 3],
        hidden_sizes=[size.width << stage for stage in range(4)],
    )
    return _images(model, size, "convnext.encoder.stages.*.layers.*")


@family(device=Size(3, 64, 8, 512), cpu=Size(1, 16, 16, 64))
def segformer(size: Size) -> Job:
    """SegFormer-B2 at its size for a device, with its loss on every pixel."""
    model = _transformer(
        *("Segformer", "SegformerForSemanticSegmentation"),
        depths=[size.layers, size.layers + 1, 2 * size.layers, size.layers],
        hidden_sizes=[factor * size.width for factor in (1, 2, 5, 8)],
        decoder_hidden_size=12 * size.width,
        num_labels=2 * size.width,
    )
    images = torch.randn(size.batch, 3, size.length, size.length)
    classes = torch.randint(2 * size.width, (size.batch, size.length, size.length))
    return Job(
        model,
        lambda images, classes: model(pixel_values=images, labels=classes).loss,
        (images, classes),
        _paths(model, "SegformerLayer"),
    )


@family(device=Size(12, 768, 16, 3000), cpu=Size(3, 64, 2, 200))
def whisper(size: Size) -> Job:
    heads = max(4, size.width // 64)
    model = _transformer(
        *("Whisper", "WhisperForConditionalGeneration"),
        vocab_size=size.words,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * size.width,
        decoder_ffn_dim=4 * size.width,
        max_source_positions=size.length // 2,
        use_cache=False,
    )
    audio, labels = torch.randn(size.batch, 80, size.length), torch.randint(size.words, (size.batch, 224))
    return Job(
        model,
        lambda audio, labels: model(input_features=audio, labels=labels).loss,
        (audio, labels),
        ["model.encoder.layers.*", "model.decoder.layers.*"],
    )


@family(device=Size(12, 768, 16, 512), cpu=Size(3, 64, 2, 64))
def t5(size: Size) -> Job:
    model = _transformer(
        *("T5", "T5ForConditionalGeneration"),
        vocab_size=size.words,
        d_model=size.width,
        d_kv=64,
        d_ff=4 * size.width,
        num_layers=size.layers,
        num_heads=max(2, size.width // 64),
        decoder_start_token_id=0,
    )
    ids, labels = (torch.randint(size.words, (size.batch, length)) for length in (size.length, size.length // 4))
    return Job(
        model,
        lambda ids, labels: model(input_ids=ids, labels=labels, use_cache=False).loss,
        (ids, labels),
        _paths(model, "T5Block"),
    )


@family(device=Size(8, 1024, 4, 2048), cpu=Size(4, 64, 2, 64))
def mixtral(size: Size) -> Job:
    model = _transformer(
        *("Mixtral", "MixtralForCausalLM"),
        vocab_size=size.words,
        **_sizes(size, heads=16, inner=11 * size.width // 4),
        num_key_value_heads=4,
        num_local_experts=8,
    )
    return _language(model, size, "model.layers.*")


class ResidualBlock(nn.Module):
    """As in diffusion UNets: two convolutions with group norm, and a skip."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, channels), nn.GroupNorm(8, out)])
        self.convolutions = nn.ModuleList([nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)])
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            h = convolution(nn.functional.silu(norm(h)))
        return self.skip(x) + h


class SkipUNet(nn.Module):
    """Three resolutions down and up, with skips from every block."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.first = nn.Conv2d(4, channels, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        kept, now = [channels], channels
        for level, width in enumerate(widths):
            for _ in range(depth):
                self.down.append(ResidualBlock(now, width))
                now = width
                kept.append(now)
            if level < len(widths) - 1:
                kept.append(now)
        self._levels, self._depth = len(widths), depth
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(depth + (level > 0)):
                self.up.append(ResidualBlock(now + kept.pop(), width))
                now = width
        self.last = nn.Conv2d(now, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips, blocks = [x], iter(self.down)
        for level in range(self._levels):
            for _ in range(self._depth):
                x = next(blocks)(x)
                skips.append(x)
            if level < self._levels - 1:
                x = nn.functional.avg_pool2d(x, 2)
                skips.append(x)
        blocks = iter(self.up)
        for level in reversed(range(self._levels)):
            for _ in range(self._depth + (level > 0)):
                x = next(blocks)(torch.cat([x, skips.pop()], dim=1))
            if level:
                x = nn.functional.interpolate(x, scale_factor=2)
        return self.last(x)


@family(device=Size(3, 320, 4, 128), cpu=Size(2, 16, 1, 32))
def unet(size: Size) -> Job:
    model = SkipUNet(size.width, size.layers)
    latents = torch.randn(size.batch, 4, size.length, size.length)
    return Job(model, lambda x: model(x).float().square().mean(), (latents,), ["down.*", "up.*"])


@family(device=Size(24, 1024, 16, 512), cpu=Size(4, 64, 2, 64))
def deberta(size: Size) -> Job:
    model = _transformer(
        *("DebertaV2", "DebertaV2ForMaskedLM"),
        vocab_size=size.words,
        **_sizes(size),
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
    )
    ids = torch.randint(size.words, (size.batch, size.length))
    return Job(model, lambda ids: model(input_ids=ids, labels=ids).loss, (ids,), _paths(model, "DebertaV2Layer"))


@family(device=Size(18, 128, 64, 224), cpu=Size(2, 16, 2, 64), small_batch=8)
def swin(size: Size) -> Job:
    model = _transformer(
        *("Swin", "SwinForImageClassification"),
        image_size=size.length,
        embed_dim=size.width,
        depths=[2, 2, size.layers, 2],
        num_heads=[max(1, size.width // 32) << stage for stage in range(4)],
        window_size=7 if size.length == 224 else 2,
    )
    return _images(model, size, _paths(model, "SwinLayer"))


@family(device=Size(16, 64, 64, 224), cpu=Size(3, 16, 4, 64), small_batch=8)
def resnet(size: Size) -> Job:
    """ResNet-101-like: batch norm in training mode, `layers` bottleneck blocks in the third stage."""
    model = _transformer(
        *("ResNet", "ResNetForImageClassification"),
        embedding_size=size.width,
        hidden_sizes=[size.width << stage for stage in range(2, 6)],
        depths=[3, 4, size.layers, 3],
    )
    return _images(model, size, _paths(model, "ResNetBottleNeckLayer"))


@family(device=Size(12, 1024, 4, 2048), cpu=Size(3, 64, 2, 64))
def olmoe(size: Size) -> Job:
    """Sixty-four small experts, of which each token uses eight."""
    model = _transformer(
        *("Olmoe", "OlmoeForCausalLM"),
        vocab_size=size.words,
        **_sizes(size, heads=16, inner=size.width // 2),
        num_key_value_heads=16,
        num_experts=64 if size.width >= 1024 else 8,
        num_experts_per_tok=8 if size.width >= 1024 else 2,
        pad_token_id=0,
    )
    return _language(model, size, _paths(model, "OlmoeDecoderLayer"))


@family(device=Size(24, 1024, 16, 160_000), cpu=Size(3, 64, 2, 4_000), small_batch=2)
def wav2vec2(size: Size) -> Job:
    """Speech: a stack of convolutions before the transformer; ten seconds a sample."""
    model = _transformer(
        *("Wav2Vec2", "Wav2Vec2ForSequenceClassification"),
        **_sizes(size),
        layerdrop=0.0,
        mask_time_prob=0.0,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
    )
    audio = torch.randn(size.batch, size.length)
    blocks = _paths(model, "Wav2Vec2EncoderLayerStableLayerNorm")
    return Job(model, lambda x: model(x).logits.float().square().mean(), (audio,), blocks)


@family(device=Size(12, 768, 128, 224), cpu=Size(2, 64, 2, 32), small_batch=16)
def clip(size: Size) -> Job:
    """Two towers whose outputs meet in the loss."""
    tower = _sizes(size)
    model = _transformer(
        *("CLIP", "CLIPModel"),
        text_config={**tower, "vocab_size": size.words, "eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 0},
        vision_config={**tower, "image_size": size.length, "patch_size": 16},
    )
    ids = torch.randint(size.words, (size.batch, 77))
    images = torch.randn(size.batch, 3, size.length, size.length)
    return Job(
        model,
        lambda ids, images: model(input_ids=ids, pixel_values=images, return_loss=True).loss,
        (ids, images),
        _paths(model, "CLIPEncoderLayer"),
    )
