"""Plans for models prepared by accelerate: `prepare`, and `fit` before and after `accelerator.prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lowtide
from hosts.training import OPTIONS, assert_same_weights, measured, parameter_bytes, tiny_llama, token_rows, weights
from lowtide.errors import LowtideError
from sweeps import sweep

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("quick_fit")


class Loop:
    """A training loop as people write it with accelerate; `prepare` stands for the line that prepares."""

    def __init__(self, prepare: Any, *, accumulation: int = 1, folder: Path | None = None) -> None:
        accelerate.state.AcceleratorState._reset_state(True)  # the second one of a test
        self.accelerator = accelerate.Accelerator(
            mixed_precision="bf16", cpu=True, gradient_accumulation_steps=accumulation, project_dir=folder
        )
        torch.manual_seed(2)
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader: Any = DataLoader(token_rows(40), batch_size=8, shuffle=True)  # type: ignore[arg-type]
        self.model, self.optimizer, self.loader = prepare(self.accelerator, model, optimizer, loader)

    def train(self) -> list[float]:
        losses, self.peak_bytes = measured(self._train)
        self.peak_bytes += parameter_bytes(self.model)
        return losses

    def _train(self) -> list[float]:
        losses = []
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def plain(accelerator: Any, *objects: Any) -> Any:
    return accelerator.prepare(*objects)


def test_prepare(tmp_path: Path) -> None:
    usual = Loop(plain, accumulation=2)
    expected = usual.train()
    budget = int(0.8 * usual.peak_bytes)

    def planned(accelerator: Any, *objects: Any) -> Any:
        return lowtide.hosts.accelerate.prepare(accelerator, *objects, budget=budget, **OPTIONS)

    fitted = Loop(planned, accumulation=2, folder=tmp_path)
    assert fitted.train() == expected and len(expected) == 5
    assert_same_weights(weights(usual.model), weights(fitted.model))
    handle = lowtide.handle_of(fitted.model)
    assert fitted.peak_bytes <= budget and handle.stats().num_replays > 0 and handle.stats().replans == ()
    assert (tmp_path / "lowtide" / "report.html").is_file()

    # Saving and loading, and the model without accelerate's and lowtide's forwards.
    fitted.accelerator.save_state(str(tmp_path / "state"), safe_serialization=False)
    fitted.accelerator.load_state(str(tmp_path / "state"))
    inner = fitted.accelerator.unwrap_model(fitted.model)
    assert inner is fitted.model and lowtide.handle_of(inner) is handle
    bare = fitted.accelerator.unwrap_model(fitted.model, keep_fp32_wrapper=False)
    handle.remove()
    assert all("forward" not in vars(module) for module in bare.modules() if module is not bare)
    other = usual.accelerator.unwrap_model(usual.model, keep_fp32_wrapper=False)
    ids = torch.ones(1, 4, dtype=torch.long)
    assert torch.equal(bare.eval()(ids).logits, other.eval()(ids).logits)


@pytest.mark.parametrize("when", sweep(["before", "after"], keep=1))
def test_fit_and_prepare_in_either_order(when: str) -> None:
    expected = (usual := Loop(plain)).train()
    handles = []

    def prepare(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> Any:
        ids = torch.stack([row["input_ids"] for row in token_rows(8)])
        batch = {"input_ids": ids, "labels": ids}
        if when == "after":
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        handles.append(
            lowtide.fit(model, lambda batch: model(**batch).loss, batch, budget=budget, optimizer=optimizer, **OPTIONS)
        )
        return (model, optimizer, loader) if when == "after" else accelerator.prepare(model, optimizer, loader)

    budget = int(0.85 * usual.peak_bytes)
    fitted = Loop(prepare)
    assert fitted.train() == expected
    assert_same_weights(weights(usual.model), weights(fitted.model))
    assert handles[0].stats().num_replays > 0 and fitted.peak_bytes <= budget
    if when == "before":  # accelerate's forward is around the patched one, and stays
        handles[0].remove()
        assert fitted.model(torch.ones(1, 4, dtype=torch.long)).logits.dtype == torch.float32
        assert "forward" in vars(fitted.model)
        batch = next(iter(fitted.loader))
        again = lowtide.fit(fitted.model, lambda batch: fitted.model(**batch).loss, batch, budget=budget, **OPTIONS)
        again.remove()


def test_what_cannot_be_planned_for_is_refused_with_what_to_do() -> None:
    def prepare(accelerator: Any, *objects: Any) -> Any:
        return lowtide.hosts.accelerate.prepare(accelerator, *objects, budget="1GiB", **options)

    options: dict[str, Any] = {"largest": lambda: torch.zeros(2, 2)}
    with pytest.raises(LowtideError, match="takes no Tensor as keywords, or returns no loss for it: give loss_fn="):
        Loop(prepare)
    options["largest"] = None
    with pytest.raises(TypeError, match=r"in this order, .* not a model of type AdamW"):
        Loop(lambda accelerator, model, optimizer, loader: prepare(accelerator, optimizer, model, loader))
    accelerate.state.AcceleratorState._reset_state(True)  # as above
    compiling = accelerate.Accelerator(cpu=True, dynamo_backend="eager")
    with pytest.raises(LowtideError, match=r"compiles the model: .* lowtide\.compile"):
        prepare(compiling, torch.nn.Linear(2, 2), None, [])
