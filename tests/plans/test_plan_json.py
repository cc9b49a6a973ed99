"""A plan's JSON is enough to apply it in another process, with the same results, bytes and replays.

The cases are made and run in this process. A second process reads the plans from files, creates the models again and
runs them; its results must be equal to the last byte.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import lowtide
from fuzz.meter import peak_of
from lowtide.eager.plan_handle import AppliedPlan
from lowtide.plans import Move, Plan, Recompute
from lowtide.simulator import simulate
from lowtide.solvers import eager_search
from replay.test_index_choices import Grouped, Looped, Model

NUM_STEPS = 3


@dataclass
class Job:
    model: nn.Module
    loss_fn: Callable[..., Tensor]
    batch: tuple[Any, ...]


class Block(nn.Module):
    """With dropout and a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 128), nn.BatchNorm1d(128), nn.Linear(128, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.norm(self.up(x)))))


def chain() -> Job:
    model = nn.Sequential(*(Block() for _ in range(6)))
    return Job(model, lambda x: model(x).square().mean(), (torch.randn(64, 32),))


def gpt() -> Job:
    job = zoo.make("gpt_dropout")
    del job.model.layers[2]
    return Job(job.model, job.loss_fn, job.batch)


def experts(kind: type[nn.Module]) -> Job:
    model = Model(kind)
    return Job(model, lambda x: model(x).square().mean(), (torch.randn(96, 16),))


def larger_chain() -> Job:
    job = chain()
    return Job(job.model, job.loss_fn, (torch.randn(100, 32),))


def fitted(job: Job, share: float) -> AppliedPlan:
    """Fitted between the floor (0) and the plain step (1)."""
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch)
    with pytest.raises(lowtide.InfeasibleBudgetError) as error:
        lowtide.solve(graph, 1)
    floor, plain = error.value.floor_bytes, simulate(graph).peak_bytes
    budget = int(1.001 * floor + share * (plain - floor))
    return lowtide.fit(job.model, job.loss_fn, *job.batch, budget=budget, time_limit_s=2, tune_s=0)


def fitted_for_larger_inputs(job: Job) -> AppliedPlan:
    """The plan for a batch that came later."""
    small = chain()
    small.model.load_state_dict(job.model.state_dict())
    handle = fitted(small, 0.3)
    state = {name: value.clone() for name, value in small.model.state_dict().items()}
    small.loss_fn(*job.batch).backward()
    small.model.load_state_dict(state)
    small.model.zero_grad()
    plan = handle.plan
    assert len(handle.shapes.all) == 2 and plan.input_shapes == ((128, 32),), plan.input_shapes
    handle.remove()
    return lowtide.apply(job.model, plan)


def moved(job: Job) -> AppliedPlan:
    """Saves, an input of a region, that of a segment and a retained output, each on another way."""
    plan = Plan(
        regions=(Recompute("1"), Recompute("2", more=(("3", 0),)), Recompute("4", keep_ops=(0, 2))),
        moves=(
            Move("0.up", 0, 0),
            Move("0.down", 0, 0, "disk"),
            Move("1", 0, 0, "host", "lossless"),
            Move("2", 0, 0),
            Move("5.down", 0, 0, "device", "int8"),
        ),
        in_flight_bytes=1 << 20,
    )
    return lowtide.apply(job.model, plan)


def applied(*regions: Recompute) -> Callable[[Job], AppliedPlan]:
    return lambda job: lowtide.apply(job.model, Plan(regions=regions))


def solved(job: Job, share: float) -> AppliedPlan:
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch)
    with pytest.raises(lowtide.InfeasibleBudgetError) as error:
        lowtide.solve(graph, 1)
    floor, plain = error.value.floor_bytes, simulate(graph).peak_bytes
    return lowtide.apply(job.model, lowtide.solve(graph, int(floor + share * (plain - floor)), time_limit_s=2))


SEGMENTS = (Recompute("0", more=(("1", 0), ("2", 0))), Recompute("3", more=(("4", 0),)))
NESTED = (Recompute("0", more=tuple((str(i), 0) for i in range(1, 6))), *(Recompute(str(i)) for i in range(6)))
RETAINED = tuple(Recompute(str(i), keep_ops=(1,)) for i in range(6))

CASES: dict[str, tuple[Callable[[], Job], Callable[[Job], AppliedPlan]]] = {
    "fitted loosely": (gpt, lambda job: fitted(job, 0.7)),
    "fitted tightly": (gpt, lambda job: fitted(job, 0.0)),
    "fitted chain": (chain, lambda job: fitted(job, 0.2)),
    "for larger inputs": (larger_chain, fitted_for_larger_inputs),
    "segments": (chain, applied(*SEGMENTS)),
    "nested": (chain, applied(*NESTED)),
    "retained": (chain, applied(*RETAINED)),
    "moved": (chain, moved),
    "looped experts": (lambda: experts(Looped), lambda job: solved(job, 0.0)),
    "grouped experts": (lambda: experts(Grouped), lambda job: solved(job, 0.3)),
}


def made(name: str) -> Job:
    torch.manual_seed(0)
    return CASES[name][0]()


def results(job: Job, handle: AppliedPlan) -> dict[str, Any]:
    """What some steps gave, what they allocated at most, and what the handle did in them."""
    torch.manual_seed(1)
    found: dict[str, Any] = {"steps": [], "peaks": []}
    before = handle.stats()
    for _ in range(NUM_STEPS):
        job.model.zero_grad()
        loss, peak = peak_of(lambda: backward(job))
        tensors = [loss, *(p.grad for p in job.model.parameters()), *job.model.buffers(), torch.get_rng_state()]
        found["steps"].append(digest(tensors))
        found["peaks"].append(peak)
    found["peaks"] = found["peaks"][1:]  # in the first, regions learn which outputs they retain
    after = handle.stats()
    found["regions"] = [[region.name, region.recomputed, region.saved_bytes] for region in after.regions]
    found["segments"] = [list(paths) for paths in after.segments]
    for name in ("num_replays", "moved_bytes", "compressed_bytes", "compressed_to_bytes", "stored_bytes"):
        found[name] = getattr(after, name) - getattr(before, name)
    return found


def backward(job: Job) -> Tensor:
    loss = job.loss_fn(*job.batch)
    loss.backward()
    return loss.detach()


def digest(tensors: list[Tensor | None]) -> str:
    parts = (b"none" if t is None else t.detach().contiguous().view(-1).view(torch.uint8).numpy() for t in tensors)
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def elsewhere(folder: str) -> None:
    """What the other process does."""
    found = {}
    for path in Path(folder).glob("*.json"):
        job = made(path.stem)
        with lowtide.apply(job.model, Plan.from_json(path.read_text())) as handle:
            found[path.stem] = results(job, handle)
    (Path(folder) / "found.txt").write_text(json.dumps(found))


SLOW = ("fitted loosely", "fitted chain", "for larger inputs", "grouped experts")
GROUPS = [tuple(name for name in CASES if name not in SLOW), pytest.param(SLOW, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Plan]]:
    """Return the results of this process, those of the second, and the plans."""
    folder = tmp_path_factory.mktemp("plans")
    here, plans = {}, {}
    for name in request.param:
        job = made(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(eager_search, "MOST_OPS", 0)  # a quick search, as for a large step
            handle = CASES[name][1](job)
        plans[name] = handle.plan
        (folder / f"{name}.json").write_text(handle.plan.to_json(graph=name != "fitted tightly"))
        here[name] = results(job, handle)
        handle.remove()
    code = "import sys; from plans import test_plan_json; test_plan_json.elsewhere(sys.argv[1])"
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent.parent)])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return here, json.loads((folder / "found.txt").read_text()), plans


@pytest.mark.parametrize("both", GROUPS, indirect=True, ids=["fast", "slow"])
def test_a_plan_gives_the_same_elsewhere(both: Any) -> None:
    here, there, plans = both
    assert there == here
    assert [Plan.from_json(plan.to_json()) for plan in plans.values()] == list(plans.values())
    assert all(found["num_replays"] > 0 for found in here.values())


@pytest.mark.parametrize("both", GROUPS[:1], indirect=True, ids=["fast"])
def test_the_cases_are_what_they_say(both: Any) -> None:
    here, _, plans = both
    assert here["moved"]["moved_bytes"] > 0 and here["moved"]["compressed_bytes"] > 0
    assert here["segments"]["segments"] and here["nested"]["segments"]
    assert plans["looped experts"].choosers
