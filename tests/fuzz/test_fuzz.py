"""Some seeds of the fuzz harness, and tests of the harness itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import lowtide
from fuzz import engines, features
from fuzz.judge import Verdict, judge
from fuzz.meter import peak_of
from fuzz.programs import Spec, random_spec
from fuzz.run import main, reproducer, run_seed
from fuzz.shrink import shrink
from lowtide import policies
from lowtide.policies import Policy
from sweeps import sweep

NUM_PER_TEST = 5


def assert_none_failed(verdicts: list[Verdict]) -> None:
    failed = [verdict for verdict in verdicts if verdict.outcome == "failed"]
    assert not failed, "\n".join(f"{v.kind}: {v.text}\n  {reproducer(v.spec)}" for v in failed[:5])
    assert verdicts


@pytest.mark.parametrize("first", sweep([10, *range(15, 50, NUM_PER_TEST), 0, 5], keep=1))
def test_policies_random_plans_and_offload_are_the_plain_model(first: int) -> None:
    seeds = range(first, first + NUM_PER_TEST)
    assert_none_failed([verdict for seed in seeds for verdict in run_seed(seed, ("apply",))])


@pytest.mark.parametrize("seed", sweep([0, 2, 1], keep=1))
def test_budgets_hold_and_are_the_plain_model(seed: int) -> None:
    assert_none_failed(run_seed(seed, ("fit",)))


@pytest.mark.parametrize("seed", sweep(range(2), keep=0))  # tests/compiled has a case of each kind
@pytest.mark.filterwarnings("ignore")
def test_the_compiled_backend_is_the_plain_compile(seed: int) -> None:
    assert_none_failed(run_seed(seed, ("compiled",)))


@pytest.mark.filterwarnings("ignore")
def test_a_removed_compile_runs_eagerly() -> None:
    """Not inductor's kernels, which differ in the last bit: this program compiles anew in each step."""
    verdict = judge(Spec(net=[["unused"]], seed=12, engine={"kind": "compiled", "share": 0.6}))
    assert verdict.outcome == "equal", verdict.text


# The harness itself.

SMALL = Spec(
    net=[["linear", "gelu"], ["residual", ["random", "dropout"]]], engine={"kind": "plan", "regions": [["", 0, []]]}
)


def broken_start(monkeypatch: pytest.MonkeyPatch, breaking: Any) -> None:
    """Let the judge see an engine that does something wrong."""

    def start(program: Any, engine: Any) -> engines.Running:
        running = engines.start(program, engine)
        breaking(program, running)
        return running

    monkeypatch.setattr("fuzz.judge.start", start)


FOUND = {
    "a replay that draws random numbers under a dispatch mode, and a forward that does not": Spec(
        net=[
            [
                "repeat",
                2,
                ["autocast", "partly off", ["memory", "dict", "detached", "zeros"], ["attention", 0.0]],
                ["unused"],
            ],
            *(["custom", "stash"], ["attention", 0.2], ["no grad", ["outside", "functional"]]),
        ],
        **{"seed": 105269, "width": 16, "batch": 3, "loop": "accumulate", "optimizer": "momentum", "output": "tuple"},
        input_grad=True,
        engine={
            "kind": "plan",
            "regions": [
                ["layers.0", 0, [17, 53, 66]],
                ["layers.0.inner.parts.0.inner.parts.0.linear", 1, []],
                ["layers.0.inner.parts.0.inner.parts.1.out", 1, []],
            ],
        },
    ),
    "a first forward, in which bytes are counted, with segments inside a layer": Spec(
        net=[["sandwich", ["norm", "group"], ["no grad", ["norm", "group"]]], ["outside", "functional"]],
        **{"seed": 200528, "width": 16, "batch": 8, "inputs": "dict", "output": "dict"},
        engine={
            "kind": "policy",
            "policy": ["Uniform", 2],
            "regions": ["head", "layers.0", "layers.0.inner.parts.0", "layers.0.inner.parts.1"],
        },
    ),
    "torch's checkpoint inside a layer of a segment, around other layers of it": Spec(
        net=[["checkpoint", "torch", ["repeat", 2, ["random", "bernoulli"]]], ["collects", ["outside", "functional"]]],
        **{"seed": 105410, "length": 6, "loop": "accumulate", "optimizer": "momentum", "output": "dict"},
        input_grad=True,
        engine={
            "kind": "policy",
            "policy": ["Uniform", 2],
            "regions": [
                *("head", "layers.0", "layers.0.inner", "layers.0.inner.parts.0", "layers.0.inner.parts.0.inner"),
                *("layers.0.inner.parts.0.inner.parts.0", "layers.0.inner.parts.0.inner.parts.0.linear", "layers.1"),
                *("layers.1.collecting", "layers.1.collecting.body", "layers.1.collecting.body.parts.0"),
            ],
        },
    ),
    "inputs in a store, of a region inside a torch checkpoint inside a region": Spec(
        net=[["checkpoint", "torch", ["linear", ""]]],
        seed=910311,
        engine={
            "kind": "policy",
            "policy": ["RecomputeAll"],
            "regions": ["layers.0", "layers.0.inner.parts.0.linear"],
            "store": True,
        },
    ),
}


@pytest.mark.parametrize("spec", FOUND.values(), ids=FOUND)
def test_what_was_found_stays_mended(spec: Spec) -> None:
    assert judge(spec).outcome == "equal"


def test_a_right_engine_passes() -> None:
    assert judge(SMALL).outcome == "equal"


def test_wrong_gradients_state_random_numbers_and_leftovers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[Any] = []

    def found_by(breaking: Any) -> str:
        with monkeypatch.context() as patch:
            broken_start(patch, breaking)
            return judge(SMALL).kind

    def halve_gradients(program: Any, running: Any) -> None:
        program.model.head.weight.register_hook(lambda gradient: gradient * 0.5)

    def count(program: Any, running: Any) -> None:
        program.model.register_forward_hook(lambda module, args, output: setattr(module, "extra", 1))

    def draw(program: Any, running: Any) -> None:
        program.model.register_forward_hook(lambda module, args, output: torch.rand(1) and None)

    def leak(program: Any, running: Any) -> None:
        program.model.register_forward_hook(lambda module, args, output: leaked.append(output.detach()))

    def stay(program: Any, running: Any) -> None:
        running.handle = None

    assert found_by(halve_gradients) == "gradient"
    assert found_by(count) == "attribute"
    assert found_by(draw) == "random"
    assert found_by(leak) == "leak"
    assert found_by(stay) == "attribute"  # a forward of its own is left


def test_a_peak_above_the_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec(net=[["wide"]] * 4, batch=64, engine={"kind": "fit", "share": 1.0})
    assert judge(spec).outcome == "equal"

    def halve_budget(program: Any, running: Any) -> None:
        running.budget_bytes //= 2

    broken_start(monkeypatch, halve_budget)
    assert judge(spec).kind == "peak"


def test_refusals_and_programs_that_do_not_run_are_told_apart() -> None:
    unknown = {"kind": "plan", "regions": [["nowhere", 0, []]]}
    assert (judge(replace(SMALL, engine=unknown)).outcome, judge(replace(SMALL, engine=unknown)).kind) == (
        "refused",
        "PlanError",
    )
    does_not_run = replace(SMALL, net=[["view", "argument"]], input_grad=True)  # writes into a leaf
    assert judge(does_not_run).outcome == "skipped"


def test_failures_shrink_to_what_makes_them_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(program: Any, running: Any) -> None:
        for module in program.model.modules():
            if isinstance(module, features.Conv):
                module.conv.weight.register_hook(lambda gradient: gradient * 2)

    broken_start(monkeypatch, breaking)
    net: list[Any] = [["linear", "gelu"], ["residual", ["norm", "batch"], ["repeat", 2, ["conv"]]], ["wide"]]
    large = Spec(
        net=net,
        optimizer="adam",
        output="dict",
        engine={"kind": "policy", "policy": ["EveryN", 2], "regions": ["layers.*"]},
    )
    smallest = shrink(judge(large))
    assert smallest.kind == "gradient"
    assert smallest.spec.net == [["conv"]]
    assert smallest.spec.engine["kind"] == "plan" and len(smallest.spec.engine["regions"]) == 1
    assert (smallest.spec.optimizer, smallest.spec.output) == ("sgd", "tensor")


def test_the_command_runs_a_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--spec", json.dumps(SMALL.to_json())]) == 0
    assert capsys.readouterr().out.startswith("equal")


def test_programs_depend_on_their_seed_only_and_use_every_block() -> None:
    assert random_spec(5) == random_spec(5) != random_spec(6)
    used = set().union(*(random_spec(seed).names for seed in range(200)))
    assert used == {*features.LEAVES, *features.WRAPPERS}


def test_the_meter_counts_what_is_alive_at_once() -> None:
    assert peak_of(lambda: torch.ones(1000).exp())[1] == 8000
    assert peak_of(lambda: [torch.ones(1000).sum() for _ in range(3)])[1] < 8000


def test_engines_use_every_policy() -> None:
    specs = [random_spec(seed) for seed in range(60)]
    drawn = [engine for spec in specs for engine in engines.random_engines(spec, _Calls(spec))]
    names = {engine["policy"][0] for engine in drawn if engine["kind"] == "policy"}
    classes = {name: each for name, each in vars(policies).items() if isinstance(each, type)}
    assert names == {
        name for name, each in classes.items() if issubclass(each, Policy) and not name.startswith("_")
    } - {"Policy"}


class _Calls(engines.Facts):
    """Facts without running anything."""

    calls = [("", 0), ("layers.0", 0), ("head", 0)]  # type: ignore[assignment]  # noqa: RUF012

    @property
    def graph(self) -> Any:  # type: ignore[override]
        raise lowtide.TraceError("not traced")
