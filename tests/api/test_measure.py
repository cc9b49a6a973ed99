"""`lowtide.measure`: the bytes and seconds of a call, as they really were."""

from __future__ import annotations

import gc

import pytest
import torch

import lowtide


def test_exact_on_the_cpu() -> None:
    kept: list[torch.Tensor] = []

    def call() -> None:
        a = torch.ones(1000)
        b = a.exp()
        del a
        kept.append(b.exp())

    measured = lowtide.measure(call, device="cpu")
    assert (measured.peak_bytes, measured.left_bytes, measured.start_bytes) == (8000, 4000, 0)
    assert measured.total_peak_bytes == 8000 and measured.seconds > 0 and measured.device == "cpu"
    assert measured.by_kind == {"before": 0, "left": 4000, "given back": 4000}
    assert str(measured).startswith("peak 7.8 KiB measured on cpu (3.9 KiB left, 3.9 KiB given back)")


def test_nothing_allocated() -> None:
    measured = lowtide.measure(lambda: None, device="cpu")
    assert measured.peak_bytes == measured.left_bytes == 0


def test_memory_that_was_there_does_not_count() -> None:
    held = [torch.ones(1000)]
    measured = lowtide.measure(held.clear, device="cpu")
    assert measured.peak_bytes == 0 and measured.by_kind["left"] == 0
    a = torch.ones(1000)
    assert lowtide.measure(lambda: a.exp_(), device="cpu").peak_bytes == 0


def test_a_training_step() -> None:
    model, x = torch.nn.Linear(100, 100, bias=False), torch.randn(10, 100)
    measured = lowtide.measure(lambda: model(x).sum().backward(), device="cpu")
    gradient = 4 * 100 * 100
    assert measured.left_bytes == gradient
    assert gradient + 4 * 10 * 100 <= measured.peak_bytes <= gradient + 4 * 10 * 100 + 100


def test_repeated() -> None:
    calls: list[int] = []
    measured = lowtide.measure(lambda: calls.append(1), device="cpu", repeat=4)
    assert len(calls) == 4 and measured.seconds >= 0
    with pytest.raises(ValueError, match="repeat"):
        lowtide.measure(lambda: None, repeat=0)
    with pytest.raises(TypeError, match=r"measure takes a function to call, such as .*, not Tensor"):
        lowtide.measure(torch.ones(1))  # type: ignore[arg-type]


def test_errors_come_through_and_the_next_one_works() -> None:
    with pytest.raises(ZeroDivisionError):
        lowtide.measure(lambda: 1 / 0, device="cpu")
    assert lowtide.measure(lambda: torch.ones(10), device="cpu").peak_bytes == 40


@pytest.mark.gpu
def test_exact_on_a_gpu() -> None:
    gc.collect()  # `measure` collects what earlier tests left, too
    held = torch.ones(1 << 20, device="cuda")
    before = torch.cuda.memory_allocated()
    measured = lowtide.measure(lambda: held.exp())
    assert measured.start_bytes == before >= held.nbytes
    assert measured.peak_bytes == held.nbytes and measured.left_bytes == 0
    assert measured.total_peak_bytes == torch.cuda.max_memory_allocated()
