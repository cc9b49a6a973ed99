"""Offload on a CUDA device: asynchronous copies without races, through a pool that is pinned once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import ActivationStore
from lowtide.errors import CapacityError

pytestmark = pytest.mark.gpu

MIB = 1024 * 1024


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Skipping(nn.Module):
    """Long skip connections: the backward asks for some values out of order."""

    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.blocks[: len(self.blocks) // 2]:
            x = block(x)
            skips.append(x)
        for block in self.blocks[len(self.blocks) // 2 :]:
            x = block(x) * torch.sigmoid(skips.pop())
        return x


def gradients(model: nn.Module, x: Tensor, store: ActivationStore | None, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    if store is None:
        loss = model(x).square().mean()
    else:
        with lowtide.offload(store, min_bytes=0):
            loss = model(x).square().mean()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "options",
    [
        {"host": "4GiB"},
        {"host": "4GiB", "in_flight": "1MiB"},
        {"host": "4GiB", "in_flight": 0},
        {"device": "8MiB", "host": "4GiB"},
        {"host": "16MiB", "disk": "4GiB"},
        {"host": "4GiB", "codec": "lossless"},
    ],
    ids=str,
)
def test_a_hundred_steps_equal_the_plain_ones(options: dict[str, Any]) -> None:
    model = Skipping().cuda()
    store = ActivationStore(**options)
    locked = None
    for step in range(10 if "disk" in options or "codec" in options else 100):
        x = torch.randn(512, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        ours, plain = gradients(model, x, store, step), gradients(model, x, None, step)
        assert all(map(torch.equal, ours, plain)), f"step {step}"
        assert len(store) == 0
        if step >= 2:
            locked = locked or store.stats().locked_bytes
            assert store.stats().locked_bytes == locked, "locked more host memory after the second step"
    assert store.stats().moved_up_bytes == store.stats().moved_down_bytes or "disk" in options or "device" in options


def test_asynchronous_copies_equal_synchronous_ones_under_load() -> None:
    """Compute is slowed at random, so that copies and compute meet in every order."""
    model = Skipping(depth=6).cuda().bfloat16()
    store = ActivationStore(host="4GiB", in_flight="2MiB")
    delays = torch.Generator().manual_seed(0)

    def slow(*_: Any) -> None:
        torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=delays)))

    handles = [block.register_forward_hook(slow) for block in model.blocks]
    handles += [block.register_full_backward_hook(slow) for block in model.blocks]
    for step in range(20):
        x = torch.randn(2048, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        ours, plain = gradients(model, x, store, step), gradients(model, x, None, step)
        assert all(map(torch.equal, ours, plain)), f"step {step}"
    for handle in handles:
        handle.remove()


def test_device_memory_falls() -> None:
    model = nn.Sequential(*(Block(512) for _ in range(8))).cuda()
    x = torch.randn(4096, 512, device="cuda", requires_grad=True)

    def step(store: ActivationStore | None) -> None:
        gradients(model, x, store, 0)

    step(None)
    plain = lowtide.measure(lambda: step(None), device="cuda").peak_bytes
    all_out = lowtide.measure(lambda: step(ActivationStore(host="8GiB", in_flight="64MiB")), device="cuda").peak_bytes
    half = ActivationStore(device=(plain // 2), host="8GiB", in_flight="64MiB")
    half_out = lowtide.measure(lambda: step(half), device="cuda").peak_bytes
    assert all_out < 0.45 * plain
    assert all_out < half_out < 0.8 * plain
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        step(half)
    assert torch.cuda.memory_allocated() == before


def test_locked_bytes_are_what_is_counted() -> None:
    store = ActivationStore(host="100MiB")
    store.put("a", torch.randn(3 * MIB, device="cuda"))
    stats = store.stats()
    assert stats.held_bytes == 12 * MIB and stats.held_bytes <= stats.locked_bytes <= 100 * MIB
    with pytest.raises(CapacityError):
        for key in range(20):
            store.put(key, torch.randn(3 * MIB, device="cuda"))
    assert store.stats().locked_bytes <= 100 * MIB


def test_without_locked_memory_it_goes_on_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    model, store = Skipping().cuda(), ActivationStore(host="4GiB")
    x = torch.randn(512, 256, device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = gradients(model, x, store, 0)
        ours = gradients(model, x, store, 0)
    assert sum("pageable copies" in str(warning.message) for warning in caught) == 1
    assert all(map(torch.equal, ours, gradients(model, x, None, 0)))


@pytest.mark.parametrize("codec", ["float16", "float8_e4m3", "int8", "int4"])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_codecs_on_the_device(codec: str, tier: str) -> None:
    store = ActivationStore(**{tier: "1GiB"}, codec=codec)
    value = torch.randn(2048, 512, device="cuda")
    value[3, 4], value[5, 6] = torch.nan, torch.inf
    store.put("x", value)
    assert store.stats().held_bytes < 0.56 * value.nbytes
    back = store.get("x")
    assert back.isnan().sum() == 1 and back.isinf().sum() == 1
    error = (back - value).nan_to_num(0, 0, 0).abs().max()
    assert error < 0.5


def test_an_error_in_the_middle_leaves_nothing() -> None:
    model, store = Skipping().cuda(), ActivationStore(host="4GiB")
    x = torch.randn(512, 256, device="cuda")
    gradients(model, x, store, 0)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        with pytest.raises(RuntimeError, match="boom"), lowtide.offload(store, min_bytes=0):
            model(x)
            raise RuntimeError("boom")
    assert len(store) == 0
    assert all(map(torch.equal, gradients(model, x, store, 1), gradients(model, x, None, 1)))
    torch.cuda.synchronize()
    store.stats()
    assert torch.cuda.memory_allocated() <= before


def test_region_inputs_in_a_store() -> None:
    model, store = Skipping(depth=4).cuda(), ActivationStore(host="4GiB")
    x = torch.randn(512, 256, device="cuda", requires_grad=True)
    found = []
    for run in (lambda block, h: block(h), lambda block, h: lowtide.checkpoint(block, h, store=store)):
        torch.manual_seed(3)
        h = x
        for block in model.blocks:
            h = run(block, h)
        found.append(torch.autograd.grad(h.square().sum(), [x, *model.parameters()]))
    assert all(map(torch.equal, *found)) and len(store) == 0


def test_torchs_stream_sanitizer_finds_no_race() -> None:
    script = """
        import torch, lowtide
        from torch import nn
        store = lowtide.ActivationStore(host="1GiB", in_flight="1MiB")
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6))).cuda()
        for step in range(4):
            x = torch.randn(512, 256, device="cuda")
            with lowtide.offload(store, min_bytes=0):
                loss = model(x).sum()
            loss.backward()
        torch.cuda.synchronize()
        print("steps done")
    """
    environment = os.environ | {"TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert "steps done" in done.stdout, done.stderr[-2000:]
    assert "race" not in done.stderr.lower(), done.stderr[-2000:]
