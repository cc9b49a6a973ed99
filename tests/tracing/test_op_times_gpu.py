"""A real trace on a GPU has both time lines of its step, host and device."""

from __future__ import annotations

import pytest
import torch
import zoo

import lowtide

pytestmark = pytest.mark.gpu


def test_a_traced_step_has_two_lines_that_come_to_what_it_takes() -> None:
    job = zoo.make("gpt_dropout", "cuda")
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch)
    assert graph.has_host_line and "limited by" in str(graph)
    assert not any("one time line" in note for note in graph.notes)
    matmuls = [op for op in graph.ops if op.name.startswith(("aten.mm", "aten.addmm", "aten.bmm"))]
    assert matmuls and all(op.seconds > 0 and op.host_s > 0 for op in matmuls)
    assert graph.lines.step_s <= 1.2 * graph.step_s  # which is that of single steps, and includes their beginning


def test_an_op_that_synchronises_is_seen() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).cuda()

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.sum() * (1.0 + 0.0 * y.detach().sum().item())

    graph = lowtide.trace(model, loss_fn, torch.randn(4, 8, device="cuda"))
    assert [op.name for op in graph.ops if "sync" in op.flags] == ["aten._local_scalar_dense.default"]
