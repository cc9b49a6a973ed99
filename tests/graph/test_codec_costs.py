"""Predicted codec costs against the codecs themselves: bytes are equal, temporary memory is an upper bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowtide
from lowtide.api.measure import measure
from lowtide.graph import Hardware, Value
from lowtide.graph.codec_costs import CHUNK, CODEC_COSTS, LOSSLESS, MIN_BYTES, encoded_form
from lowtide.plans import Move, Plan, Recompute
from lowtide.simulator import simulate
from lowtide.store import CODECS, LOSSY_CODECS

DTYPES = {1: torch.float8_e5m2, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
HARDWARE = Hardware("test", memory_bytes_per_s=4.8e12)
CPU = torch.device("cpu")


def value(size: int, item_bytes: int = 4, row_length: int = 64) -> Value:
    return Value(size, "activation", "y", 0, 1, item_bytes, row_length)


def test_every_codec_has_its_like() -> None:
    assert [*CODEC_COSTS, LOSSLESS] == list(CODECS)
    assert tuple(CODEC_COSTS) == LOSSY_CODECS
    assert all(not CODECS[name].is_lossless for name in CODEC_COSTS) and CODECS[LOSSLESS].is_lossless


@pytest.mark.parametrize("name", CODEC_COSTS)
@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 20_000),
    item_bytes=st.sampled_from(list(DTYPES)),
    row_length=st.integers(1, 300) | st.integers(1, 20_000),
)
def test_bytes_are_those_of_the_codec(name: str, numel: int, item_bytes: int, row_length: int) -> None:
    encoded = CODECS[name].encode(torch.ones(numel).to(DTYPES[item_bytes]), row_length)
    told = CODEC_COSTS[name].parts(numel, item_bytes, row_length)
    assert told == (None if encoded is None else tuple(part.nbytes for part in encoded.parts))


@pytest.mark.parametrize("name", CODEC_COSTS)
def test_bytes_of_several_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.store.codecs.CHUNK", 1000)
    for numel, row_length in ((8_000, 100), (8_001, 37), (9_999, 1_001), (5_000, 5_000)):
        encoded = CODECS[name].encode(torch.randn(numel), row_length)
        assert encoded is not None
        assert CODEC_COSTS[name].parts(numel, 4, row_length) == tuple(part.nbytes for part in encoded.parts)


@pytest.mark.parametrize("name", CODEC_COSTS)
@pytest.mark.parametrize("item_bytes", [2, 4, 8])
def test_working_memory_is_bounded(name: str, item_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size, and not by far: measured with small chunks, a value of less than one and one of many."""
    monkeypatch.setattr("lowtide.store.codecs.CHUNK", 1 << 14)
    monkeypatch.setattr("lowtide.graph.codec_costs.CHUNK", 1 << 14)
    codec = CODECS[name]
    for numel in (10_000, 1 << 18):
        flat = torch.randn(numel).to(DTYPES[item_bytes])
        form = encoded_form(value(flat.nbytes, item_bytes), name, HARDWARE)
        encoded = codec.encode(flat, 64)
        if form is None or encoded is None:
            assert form is None and encoded is None and (name, item_bytes) in (("float16", 2), ("bfloat16", 2))
            continue
        assert form.bytes == encoded.nbytes
        encoding = measure(lambda flat=flat: codec.encode(flat, 64), device=CPU).peak_bytes - encoded.nbytes
        decoding = measure(lambda e=encoded: codec.decode(e, e.parts), device=CPU).peak_bytes - flat.nbytes
        slack = 2048  # single numbers, 64 bytes each
        assert encoding <= form.encode_bytes + slack and form.encode_bytes <= 3 * encoding
        assert decoding <= form.decode_bytes + slack and form.decode_bytes <= 1.5 * decoding


@pytest.mark.parametrize("name", CODEC_COSTS)
def test_seconds_grow_with_values_and_shrink_with_bandwidth(name: str) -> None:
    small, large = (encoded_form(value(size), name, HARDWARE) for size in (1 << 20, 1 << 28))
    fast = encoded_form(value(1 << 28), name, Hardware("test", memory_bytes_per_s=9.6e12))
    assert small is not None and large is not None and fast is not None
    assert 0 < small.encode_s < large.encode_s and 0 < small.decode_s < large.decode_s
    assert large.encode_s / 2 < fast.encode_s < large.encode_s


@pytest.mark.parametrize(
    ("name", "item_bytes", "write", "read"),
    [("float16", 4, 145.6, 208.6), ("int8", 4, 27.7, 51.6), ("int8", 2, 13.3, 26.5), ("int4", 2, 10.8, 18.8)],
)
def test_seconds_are_near_those_measured(name: str, item_bytes: int, write: float, read: float) -> None:
    """GB/s of bench/results/codecs-cuda.md, for 67 million values on an H200."""
    size = item_bytes << 26
    form = encoded_form(value(size, item_bytes, 1024), name, HARDWARE)
    assert form is not None
    assert form.encode_s == pytest.approx(size / write / 1e9, rel=0.15)
    assert form.decode_s == pytest.approx(size / read / 1e9, rel=0.15)


def test_parts_are_rounded_as_the_allocator_does() -> None:
    plain = encoded_form(value(8192), "int8", HARDWARE)
    rounded = encoded_form(value(8192), "int8", Hardware("test", memory_bytes_per_s=4.8e12, block_bytes=512))
    assert plain is not None and plain.bytes == 2048 + 16 * 4
    assert rounded is not None and rounded.bytes == 2048 + 512


@pytest.mark.parametrize(
    ("facts", "codec", "hardware"),
    [
        (value(MIN_BYTES - 4), "int8", HARDWARE),
        (value(8192, item_bytes=0), "int8", HARDWARE),
        (value(8192, item_bytes=2), "float16", HARDWARE),
        (value(8192), "lossless", HARDWARE),
        (value(8192), "", HARDWARE),
        (value(8192), "int8", Hardware("unknown")),
    ],
)
def test_what_is_held_as_it_is(facts: Value, codec: str, hardware: Hardware) -> None:
    assert encoded_form(facts, codec, hardware) is None


def test_a_row_longer_than_a_chunk_is_worked_on_whole() -> None:
    short, long = (encoded_form(value(64 * CHUNK, row_length=row), "float8_e4m3", HARDWARE) for row in (64, 4 * CHUNK))
    assert short is not None and long is not None
    assert long.decode_bytes == 4 * short.decode_bytes


# What tracing finds out


def saved_activations(graph: lowtide.StepGraph) -> list[Value]:
    saved = dict.fromkeys(save.value for save in graph.saves)
    return [graph.values[index] for index in saved if graph.values[index].kind == "activation"]


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("codec", ["int8", "float8_e4m3", "float16"])
def test_a_traced_step_says_what_a_store_will_hold(mode: Any, codec: str) -> None:
    model = nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.LayerNorm(160), nn.Linear(160, 96), nn.Softmax(-1))
    batch = torch.randn(64, 96)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    graph = lowtide.trace(model, loss_fn, batch, mode=mode)
    values = [graph.values[index] for index in dict.fromkeys(save.value for save in graph.saves)]
    forms = [(v, encoded_form(v, codec, HARDWARE)) for v in values if v.kind in ("activation", "batch")]
    told = sum(v.bytes if form is None else form.bytes for v, form in forms)
    with lowtide.ActivationStore(codec=codec) as store, lowtide.offload(store, min_bytes=0):
        loss = loss_fn(batch)
        assert store.stats().held_bytes == told
    assert sum(form is not None for _, form in forms) >= 5
    del loss


def test_what_tracing_leaves_to_no_codec() -> None:
    """Integers, masks, parts of a storage, and what is saved as two types; floats of every width are for codecs."""
    model = nn.Linear(64, 64, bias=False)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        h = model(x)
        parts = (h * 2).chunk(4)  # each a quarter of one storage
        both = (h + 1).exp()
        as_int = both.detach().view(torch.int32)
        picked = h.gather(1, h.argmax(1, keepdim=True))
        mixed = torch.where(as_int > 0, both, h)
        return sum(p.square().sum() for p in parts) + (picked * mixed).sum() + h.double().sin().sum()

    graph = lowtide.trace(model, loss_fn, torch.randn(64, 64), mode="fake")
    found = {v.name.removeprefix("aten.").split(".")[0]: v.item_bytes for v in saved_activations(graph)}
    assert found["mul"] == 0 and found["argmax"] == 0 and found["gt"] == 0
    assert found["exp"] == 4 and found["_to_copy"] == 8


def test_rows_are_those_of_the_tensor_that_is_saved() -> None:
    model = nn.Linear(32, 48, bias=False)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return model(x).view(64, 2, 24).sin().sum()

    for mode in ("real", "fake"):
        graph = lowtide.trace(model, loss_fn, torch.randn(64, 32), mode=mode)
        assert [v.row_length for v in saved_activations(graph)] == [24]


# What the simulator says of it, and what a step under a store with a codec really allocates


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


@cache
def stack() -> tuple[nn.Sequential, torch.Tensor, Callable[[torch.Tensor], torch.Tensor], lowtide.StepGraph]:
    model, batch = nn.Sequential(*(Block(64) for _ in range(4))), torch.randn(256, 64)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    return model, batch, loss_fn, lowtide.trace(model, loss_fn, batch, mode="fake")


@pytest.mark.parametrize("codec", ["int8", "float16"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("chunk", [1 << 12, CHUNK])
def test_the_simulated_peak_is_the_measured_one(
    codec: str, recomputes: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.store.codecs.CHUNK", chunk)
    monkeypatch.setattr("lowtide.graph.codec_costs.CHUNK", chunk)
    model, batch, loss_fn, graph = stack()

    def recomputing_loss_fn(x: torch.Tensor) -> torch.Tensor:
        x = model[0](x)
        for block in model[1:]:
            x = lowtide.checkpoint(block, x)
        return x.square().mean()

    number: dict[int, int] = {}
    moves = []
    for save in graph.saves:
        nth = number.setdefault(save.call, 0)
        number[save.call] += 1
        if save.call >= 0:
            moves.append(Move(graph.calls[save.call].path, 0, nth, "device", codec))
    regions = tuple(Recompute(str(index)) for index in range(1, 4)) if recomputes else ()
    told = simulate(graph, Plan(regions, tuple(moves)))

    def step() -> None:
        with lowtide.ActivationStore(codec=codec) as store:
            with lowtide.offload(store, min_bytes=0):
                loss = (recomputing_loss_fn if recomputes else loss_fn)(batch)
            loss.backward()
        model.zero_grad()

    step()
    measured = measure(step, device=CPU).peak_bytes
    form = encoded_form(value(batch.nbytes), codec, HARDWARE)  # the batch is saved too, and no value of the step
    assert form is not None and told.coded_s > 0
    static = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    assert abs(told.peak_bytes - static - (measured - form.bytes)) <= 100  # single numbers
