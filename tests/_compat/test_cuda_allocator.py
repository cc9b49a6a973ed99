"""Canaries for `_compat/cuda_allocator.py`: a capture that failed leaves no memory behind."""

from __future__ import annotations

import pytest
import torch

from lowtide._compat import cuda_allocator


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_pool_is_released_once(monkeypatch: pytest.MonkeyPatch, has_ended: bool) -> None:
    calls: list[str] = []

    def end(device: int, pool: tuple[int, int]) -> None:
        calls.append("end")
        if has_ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(cuda_allocator, "_end_allocate", end)
    monkeypatch.setattr(cuda_allocator, "_release", lambda device, pool: calls.append("release"))
    cuda_allocator.give_up_pool(0, (0, 1))
    assert calls == ["end"] if has_ended else ["end", "release"]


def _capture_nothing(stream: torch.cuda.Stream) -> None:
    """A capture that succeeds: before torch 2.13, a failed one leaves the generators in capture mode."""
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        x.zero_()
        graph.capture_end()
    graph.reset()


@pytest.mark.gpu
def test_memory_of_a_failed_capture_is_freed() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    def reserved() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    x, stream, pool = torch.ones(1 << 22, device="cuda"), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    before, graph = reserved(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        y = x + 1
        with pytest.raises(RuntimeError, match="captur"):
            y.max().item()
        with pytest.raises(RuntimeError):
            graph.capture_end()
    del y
    cuda_allocator.give_up_pool(torch.cuda.current_device(), pool)
    del graph
    _capture_nothing(stream)
    # torch 2.13 ends a failed capture, and later versions also release its pool.
    assert reserved() <= before + x.nbytes
    later = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del later
    assert reserved() <= before + x.nbytes, "the allocator still frees what nothing uses"
