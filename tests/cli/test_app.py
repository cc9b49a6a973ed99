"""The `lowtide` command: its output, its exit codes, and how it loads a user's script."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.plans import Frontier

typer_testing = pytest.importorskip("typer.testing")
pytest.importorskip("rich")

from rich.console import Console  # noqa: E402

from lowtide.cli import app as commands  # noqa: E402
from lowtide.cli import demo, main  # noqa: E402
from lowtide.cli.bench import OURS, PER_BLOCK, PLAIN, BenchRow, Comparison, _apart  # noqa: E402
from lowtide.cli.output import Output  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_search")

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import sys
import torch
from torch import nn
from beside import WIDTH

print("the script talks")
assert __name__ != "__main__" and sys.argv == [{path!r}], sys.argv


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def make():
    model = nn.Sequential(*(Block() for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, lambda x: model(x).square().mean(), torch.randn(256, WIDTH), optimizer


def as_dict():
    model, loss_fn, batch, optimizer = make()
    return dict(model=model, loss_fn=loss_fn, batch=(batch,))


def single():
    model = nn.Linear(8, 8)
    return model, lambda x: model(x).sum(), torch.randn(4, 8)


def checkpointed():
    model, loss_fn, batch, _ = make()
    model[0].gradient_checkpointing = True
    return model, loss_fn, batch


def on_gpu():
    model, loss_fn, batch, _ = make()
    return model.cuda(), loss_fn, batch.cuda()


def on_meta():
    with torch.device("meta"):
        return make()


def broken():
    raise ValueError("no such dataset")


def asserts():
    assert False


def leaves():
    sys.exit("bye")


def wants(path):
    pass


two = lambda: (nn.Linear(2, 2), print)
no_model = lambda: (1, print, 2)
no_loss = lambda: (nn.Linear(2, 2), 1, 2)
no_optimizer = lambda: (nn.Linear(2, 2), print, 2, 3)
misspelt = lambda: dict(model=nn.Linear(2, 2), loss_fn=print, bacth=1)
unknown = lambda: dict(model=nn.Linear(2, 2), loss_fn=print, batch=1, lr=1)
lacking = lambda: dict(model=nn.Linear(2, 2), batch=1)
number = 3

if __name__ == "__main__":
    raise SystemExit("training")
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(path=str(path)))
    (tmp_path / "beside.py").write_text("WIDTH = 32\n")
    before, modules = list(sys.path), set(sys.modules)
    yield path
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def invoke(*words: object, env: dict[str, str] | None = None) -> Any:
    """The command with these words, run in this process."""
    return typer_testing.CliRunner().invoke(commands.app, [str(word) for word in words], env=env, prog_name="lowtide")


def answer(*words: object) -> dict[str, Any]:
    """What the command prints with `--json`: one object, and nothing else on stdout."""
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


_plans: list[str] = []


@pytest.fixture
def plan_file(script: Path, tmp_path: Path) -> Path:
    """A plan for the script; made by the first test that asks for it."""
    path = tmp_path / "plan.json"
    if not _plans:
        assert invoke("plan", f"{script}:make", "--budget", "1150KiB", "--fake", "-o", path).exit_code == 0
        _plans.append(path.read_text())
    path.write_text(_plans[0])
    return path


# What it shows.


def test_estimate(script: Path) -> None:
    found = answer("estimate", f"{script}:make")
    assert found["predicted"] and found["static_bytes"]["optimizer state"] > 0
    assert found["floor_bytes"] < found["peak_bytes"]
    shown = invoke("estimate", f"{script}:make", "--device", "H100").stdout
    assert shown.startswith("predicted") and "H100" in shown and "the script talks" not in shown


@pytest.mark.parametrize(
    ("budget", "fits"), [("1GiB", "plain"), ("80%", "plain"), ("1150KiB", "with a plan"), ("99KiB", "no")]
)
def test_estimate_says_whether_a_budget_is_enough(script: Path, budget: str, fits: str) -> None:
    result = invoke("estimate", f"{script}:make", "--budget", budget, "--json")
    assert json.loads(result.stdout)["fits"] == fits
    assert result.exit_code == (3 if fits == "no" else 0)


@pytest.mark.usefixtures("quick_fit")
def test_plan(script: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = invoke("plan", f"{script}:make", "--budget", "1150KiB", "-o", file)
    assert result.exit_code == 0
    assert result.stdout.startswith("Plan (all numbers predicted)") and str(file) in result.stderr
    data = answer("plan", f"{script}:make", "--budget", str(1150 * 1024), "-o", file)
    found = lowtide.Plan.from_json(file.read_text())
    assert found.regions and found.peak_bytes <= found.budget_bytes == 1150 * 1024
    assert data["is_step_measured"] and data["num_regions"] == len(found.regions) and data["output"] == str(file)
    assert data["peak_bytes"] == found.peak_bytes


def test_plan_on_fake_tensors(script: Path) -> None:
    assert not answer("plan", f"{script}:make", "--budget", "1150KiB", "--fake")["is_step_measured"]


def test_plan_for_a_device_that_is_not_here(script: Path) -> None:
    data = answer("plan", f"{script}:make", "--budget", "80%", "--fake", "--device", "H100")
    assert data["device"] == "H100" and data["is_plain"] and not data["is_step_measured"]
    assert any("CPU's kernels" in note for note in data["notes"])


def test_plan_for_the_compiled_engine(script: Path) -> None:
    assert (
        answer("plan", f"{script}:make", "--budget", "1150KiB", "--fake", "--engine", "compiled")["engine"]
        == "compiled"
    )


@pytest.mark.parametrize(("name", "more"), [("plan", []), ("solve", ["--fake"]), ("sweep", ["--fake"])])
def test_only_options_that_were_given_are_passed_on(
    script: Path, name: str, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    graph = lowtide.StepGraph((), 0, (), (), (), lowtide.Plan().hardware)

    def spy(*_: Any, **options: Any) -> Any:
        seen.append({key: value for key, value in options.items() if key not in ("budget", "optimizer", "engine")})
        return Frontier((), (), 0.0, 0, 0) if name == "sweep" else lowtide.Plan(graph=graph)

    monkeypatch.setattr(lowtide, name, spy)
    words = ["sweep" if name == "sweep" else "plan", f"{script}:make", "--budget", "1GiB", *more]
    assert invoke(*words).exit_code == 0
    assert invoke(*words, "--host", "1GiB", "--lossy", "int8", "--time-limit-s", "3").exit_code == 0
    assert seen == [{}, {"host": "1GiB", "lossy": "int8", "time_limit_s": 3.0}]


def test_sweep(script: Path) -> None:
    data = answer("sweep", f"{script}:make", "--fake")
    assert len(data["plans"]) == 16 and {"nothing", "a checkpoint per block"} <= {r["name"] for r in data["references"]}
    assert data["plans"][0]["peak_bytes"] == data["floor_bytes"] and data["png"] is None
    two = answer("sweep", f"{script}:make", "--fake", "--budget", "1150KiB", "-b", "1000KiB")["plans"]
    assert [found["budget_bytes"] for found in two] == [1000 * 1024, 1150 * 1024]
    assert "slower" in invoke("sweep", f"{script}:make", "--fake").stdout


def test_explain(plan_file: Path) -> None:
    path = lowtide.Plan.from_json(plan_file.read_text()).regions[0].path
    assert f"{path} is recomputed" in invoke("explain", plan_file, path).stdout
    data = answer("explain", plan_file, path)
    assert data["regions"][0]["path"] == path and all(row["path"].startswith(path) for row in data["values"])


def test_explain_without_a_module_lists_the_modules(plan_file: Path, tmp_path: Path) -> None:
    shown = invoke("explain", plan_file)
    assert shown.exit_code == 0 and {"0", "1.up", "3"} <= set(shown.stdout.split())
    assert answer("explain", plan_file)["modules"] == shown.stdout.split()
    (tmp_path / "empty.json").write_text(lowtide.Plan().to_json())
    assert invoke("explain", tmp_path / "empty.json").stdout == "It is an empty plan: everything is kept.\n"


def test_a_file_that_cannot_be_written(plan_file: Path, script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder.py"
    folder.mkdir()
    result = invoke("estimate", folder)
    assert result.exit_code == 2 and "Did you mean" not in result.stderr
    (tmp_path / "page.html").symlink_to("/dev/full")
    result = invoke("report", plan_file, "--output", tmp_path / "page.html")
    assert result.exit_code == 2 and "page.html cannot be written: No space left" in result.stderr


def test_sweep_draws(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "curve.png"
    assert answer("sweep", f"{script}:make", "--fake", "-b", "1150KiB", "--png", png)["png"] == str(png)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_report(plan_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    data = answer("report", plan_file, "-o", page)
    assert page.read_text().startswith("<!doctype html>") and data["num_bytes"] == page.stat().st_size
    assert "measured_peak_bytes" not in data
    shown = invoke("report", plan_file, "-o", tmp_path / "page.md")
    assert shown.exit_code == 0 and str(tmp_path / "page.md") in shown.stdout.replace("\n", "")


def test_report_of_what_was_measured(plan_file: Path, script: Path, tmp_path: Path) -> None:
    data = answer("report", plan_file, "-o", tmp_path / "page.md", "--measured", f"{script}:make")
    budget = lowtide.Plan.from_json(plan_file.read_text()).budget_bytes
    assert 0 < data["measured_peak_bytes"] <= budget and data["measured_step_s"] > 0
    other = invoke("report", plan_file, "-o", tmp_path / "page.md", "--measured", f"{script}:single")
    assert other.exit_code == 1 and "no such module" in other.stderr


def test_a_report_never_replaces_its_plan(plan_file: Path) -> None:
    before = plan_file.read_text()
    result = invoke("report", plan_file, "--output", plan_file)
    assert result.exit_code == 2 and "over the plan" in result.stderr and plan_file.read_text() == before


@pytest.mark.usefixtures("quick_fit")
def test_bench(script: Path) -> None:
    data = answer("bench", f"{script}:make", "--budget", "1150KiB", "--rounds", "1")
    rows = {row["name"]: row for row in data["rows"]}
    assert list(rows) == [PLAIN, PER_BLOCK, OURS] and data["holds"]
    assert rows[OURS]["peak_bytes"] <= data["budget_bytes"] < rows[PLAIN]["peak_bytes"]
    assert rows[PER_BLOCK]["peak_bytes"] < rows[PLAIN]["peak_bytes"]
    assert {row["gradient_difference"] for row in rows.values()} == {0.0}
    assert all(row["step_s"] > 0 for row in rows.values()) and rows[PLAIN]["slowdown"] == 0


def test_bench_compares_gradients_of_every_kind() -> None:
    import torch

    some = torch.tensor([1.0, float("nan"), 3.0])
    assert _apart(some, some.clone()) == 0.0
    assert _apart(some, some + torch.tensor([0.0, 0.0, 0.5])) == 0.5
    assert _apart(some, torch.ones(3)) == float("inf")


@pytest.mark.usefixtures("quick_fit")
def test_bench_tells_a_way_that_gives_other_gradients(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: Any, module: Any, x: Any, **_: Any) -> Any:
        return 2 * function(module, x)

    monkeypatch.setattr("lowtide.cli.bench.checkpoint", wrong)
    rows = answer("bench", f"{script}:make", "--budget", "1150KiB", "--rounds", "1")["rows"]
    assert [row["gradient_difference"] > 0 for row in rows] == [False, True, False]


def test_bench_of_a_model_without_blocks(script: Path) -> None:
    result = invoke("bench", f"{script}:single", "--budget", "1GiB", "--rounds", "1")
    assert result.exit_code == 0 and "no repeated blocks" in result.stdout and "held, with the same" in result.stdout


@pytest.mark.gpu
def test_on_a_gpu(script: Path) -> None:
    found = {finding["name"]: finding for finding in answer("doctor")["findings"]}
    assert found["cuda:0 link"]["value"] > 0 and found["pinning"]["value"] is True
    data = answer("bench", f"{script}:on_gpu", "--budget", "1GiB", "--rounds", "1")
    assert data["holds"] and all(row["peak_bytes"] > 0 and row["step_s"] > 0 for row in data["rows"])


PLAIN_ROW = BenchRow(PLAIN, 20, 1.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "holds"),
    [
        ((PLAIN_ROW, BenchRow(OURS, 10, 1.0, 0.0)), True),
        ((PLAIN_ROW, BenchRow(OURS, 11, 1.0, 0.0)), False),
        ((PLAIN_ROW, BenchRow(OURS, 10, 1.0, 1e-7)), False),
        ((PLAIN_ROW, BenchRow(OURS, problem="out of memory")), False),
        ((BenchRow(PLAIN, 20, 1.0, 1e-6), BenchRow(OURS, 10, 1.0, 1e-6)), True),  # kernels that are not deterministic
        (
            (BenchRow(PLAIN, problem="out of memory"), BenchRow(PER_BLOCK, 9, 1.0, 0.0), BenchRow(OURS, 10, 1.0, 0.0)),
            True,
        ),
        ((BenchRow(PLAIN, problem="out of memory"), BenchRow(OURS, 10, 1.0, 0.0)), True),
    ],
)
def test_a_bench_that_does_not_hold_is_an_exit_code(
    script: Path, monkeypatch: pytest.MonkeyPatch, rows: tuple[BenchRow, ...], holds: bool
) -> None:
    found = Comparison(rows, lowtide.Plan(), 10)
    assert found.holds is holds
    monkeypatch.setattr("lowtide.cli.bench.compare", lambda *_: found)
    result = invoke("bench", f"{script}:make", "--budget", "1150KiB")
    assert result.exit_code == (0 if holds else 4) and ("did not hold" in result.stdout) is not holds


def test_doctor(script: Path) -> None:
    found = {finding["name"]: finding for finding in answer("doctor", f"{script}:make")["findings"]}
    assert found["lowtide"]["value"] == lowtide.__version__
    assert {"torch", "cpu", "locked memory (ulimit -l)", "checkpointing"} <= set(found)
    shown = invoke("doctor")
    assert shown.exit_code == 0 and "no other checkpointing in this process" in shown.stdout


def test_doctor_finds_other_checkpointing(script: Path) -> None:
    import torch

    result = invoke("doctor", f"{script}:checkpointed")
    assert result.exit_code == 4 and "gradient checkpointing on already" in result.stdout
    with torch.autograd.graph.save_on_cpu():
        result = invoke("doctor", "--json")
    assert result.exit_code == 4 and json.loads(result.stdout)["num_problems"] == 1
    result = invoke("doctor", env={"CUDA_LAUNCH_BLOCKING": "1"})
    assert result.exit_code == 0 and "CUDA_LAUNCH_BLOCKING" in result.stdout
    with torch.autograd.graph.save_on_cpu():  # looking left nothing behind
        pass


@pytest.mark.slow  # test_demo.py runs it
@pytest.mark.usefixtures("quick_fit")
def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WIDTH": 32,
        "HEADS": 4,
        "LAYERS": 3,
        "CONTEXT": 32,
        "BATCH": 4,
        "STEPS": 1,
        "ROUNDS": 1,
    }.items():
        monkeypatch.setattr(demo, name, value)
    data = answer("demo")
    assert data["is_exact"] and data["holds"] and len(data["rows"]) == 3


def test_version_and_help() -> None:
    assert invoke("--version").stdout == f"lowtide {lowtide.__version__}\n"
    shown = invoke("--help").stdout
    assert "Exit codes" in shown
    for name in ("demo", "doctor", "estimate", "plan", "sweep", "explain", "report", "bench"):
        assert name in shown
        assert "--json" in invoke(name, "--help").stdout


# How it ends.


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan", "{script}:make", "--budget", "1KiB", "--fake"], 3, "floor"),
        (["plan", "{script}:make", "--budget", "12G"], 2, "Did you mean 12GiB?"),
        (["plan", "{script}:make", "--budget", "12,5 gigs"], 2, "Did you mean 12.5GiB?"),
        (["plan", "{script}:make", "--budget", "12"], 2, "Did you mean 12GiB?"),
        (["plan", "{script}:make", "--budget", "0.5"], 2, "Write whole bytes"),
        (["plan", "{script}:make", "--budget", "1GiB", "--host", "1apple"], 2, "--host"),
        (["plan", "{script}:make", "--budget", "1GiB", "--host", "1GiB", "--fake"], 1, "no link to host memory"),
        (["plan", "{script}:make"], 2, "--budget"),
        (["plan", "{script}:make", "--budget", "1GiB", "--engine", "lazy"], 2, "eager"),
        (["plan", "{script}:make", "--budget", "1GiB", "-o", "{folder}/none/plan.json"], 2, "no folder"),
        (["plan", "{script}:make", "--budget", "1GiB", "--device", "H1000"], 2, "H100"),
        (["plan", "{folder}/trian.py:make", "--budget", "1GiB"], 2, "Did you mean 'train.py'?"),
        (["plan", "{folder}/none/x.py:make", "--budget", "1GiB"], 2, "there is no file"),
        (["plan", "nosuchmodule:make", "--budget", "1GiB"], 2, "no file or module nosuchmodule"),
        (["estimate", "{script}:mak"], 2, "Did you mean 'make'?"),
        (["estimate", "{script}:wants"], 2, "needs path"),
        (["estimate", "{script}:number"], 2, "is a int, not a function"),
        (["estimate", "{script}:two"], 2, "a tuple of 2"),
        (["estimate", "{script}:no_model"], 2, "not an nn.Module"),
        (["estimate", "{script}:no_loss"], 2, "not a function of the batch"),
        (["estimate", "{script}:no_optimizer"], 2, "not a torch.optim.Optimizer"),
        (["estimate", "{script}:misspelt"], 2, "Did you mean 'batch'?"),
        (["estimate", "{script}:broken"], 1, "ValueError: no such dataset (train.py, line"),
        (["estimate", "{script}:leaves"], 1, "called sys.exit"),
        (["bench", "{script}:on_meta", "--budget", "1GiB"], 2, "meta device"),
        (["sweep", "{script}:make", "--png", "curve.doc"], 2, ".png"),
        (["sweep", "{script}:make", "--png", "{folder}/none/curve.png"], 2, "no folder"),
        (["explain", "{folder}/plan.json", "0"], 2, "there is no file"),
        (["explain", "{folder}/beside.py", "0"], 1, "beside.py"),
        (["report", "{folder}/plan.json"], 2, "there is no file"),
        (["plna"], 2, "Did you mean 'plan'?"),
        (["estimate", "{script}:unknown"], 2, "has the unknown 'lr'"),
        (["estimate", "{script}:lacking"], 2, "lacks 'loss_fn'"),
        (["estimate", ":make"], 2, "names no script"),
        (["estimate", ""], 2, "names no script"),
        (["estimate", "."], 2, "names no script"),
        (["doctor", "./"], 2, "names no script"),
        (["estimate", "{script}", "--device", "NOPE"], 2, "--device: 'NOPE' is neither"),
        (["plan", "{script}", "--budget", "1GiB", "--device", ""], 2, "--device: '' is neither"),
        (["sweep", "{script}", "--fake", "--device", "NOPE"], 2, "--device: 'NOPE' is neither"),
        (
            ["plan", "{script}", "--budget", "1GiB", "--lossy", "int9"],
            2,
            "--lossy: 'int9' is not a lossy codec. Did you",
        ),
        (["sweep", "{script}", "--lossy", "nope"], 2, "--lossy: 'nope' is not a lossy codec. There are float16"),
        (["bench", "{script}", "--budget", "1GiB", "--lossy", ""], 2, "--lossy: '' is not a lossy codec"),
        (["plan", "{script}", "--budget", "0"], 2, "--budget: 0 is 0 bytes"),
        (["plan", "{script}", "--budget", "1GiB", "--host", "00"], 2, "--host: 00 is 0 bytes"),
        (["plan", "{script}", "--budget", "1GiB", "--host", "50%"], 2, "--host: '50%' is a share"),
        (["plan", "{script}", "--budget", "٣"], 2, "--budget: '٣' is not a number of bytes"),
        (["plan", "{script}", "--budget", "1GiB", "-o", "{folder}"], 2, "is a folder: name the file to write"),
        (["plan", "{script}", "--budget", "1GiB", "-o", ""], 2, "'.' is a folder"),
        (["explain", "."], 2, "there is no file '.'"),
        (["estimate", "{script}:asserts"], 1, "Error: AssertionError (train.py, line"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else "",
)
def test_errors_have_a_code_and_a_cure_and_no_traceback(script: Path, words: list[str], code: int, said: str) -> None:
    result = invoke(*(word.format(script=script, folder=script.parent) for word in words))
    assert result.exit_code == code, result.output
    assert said in re.sub(r"\s+", " ", result.stderr.replace("│", "")), result.stderr
    assert "Traceback" not in result.output and result.stdout == ""


def test_errors_as_data(script: Path) -> None:
    result = invoke("plan", f"{script}:make", "--budget", "1KiB", "--fake", "--json")
    found = json.loads(result.stdout)
    assert found["error"] == "InfeasibleBudgetError" and found["exit_code"] == result.exit_code == 3
    assert found["floor_bytes"] > 1024 and "floor" in found["message"]


def test_debug_shows_the_traceback(script: Path) -> None:
    result = invoke("estimate", f"{script}:broken", "--debug")
    assert result.exit_code == 1 and "Traceback" in result.stderr and "raise ValueError" in result.stderr


def test_a_module_the_plan_does_not_know(plan_file: Path) -> None:
    result = invoke("explain", plan_file, "1.upp")
    assert result.exit_code == 2 and "Did you mean '1.up'?" in result.stderr


def test_an_interrupted_command(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lowtide, "estimate", interrupted)
    result = invoke("estimate", f"{script}:make")
    assert result.exit_code == 130 and "interrupted" in result.stderr


def test_what_a_script_needs_and_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("import nowhere_to_be_found\n")
    result = invoke("estimate", f"{tmp_path / 'alone.py'}:make")
    assert result.exit_code == 1 and "nowhere_to_be_found" in result.stderr and "alone.py, line 1" in result.stderr


# How it finds a script.


def test_a_dict_a_tuple_and_no_function_name(script: Path) -> None:
    named, default = answer("estimate", f"{script}:as_dict"), answer("estimate", str(script))
    assert named["static_bytes"]["parameters"] == default["static_bytes"]["parameters"]
    assert named["static_bytes"]["optimizer state"] == 0


def test_a_module_of_a_package(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = script.parent / "jobs_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "small.py").write_text("import train\nfrom train import single\n")
    (script.parent / "train.py").write_text(SCRIPT.format(path="jobs_of_mine.small"))
    monkeypatch.chdir(script.parent)
    assert answer("estimate", "jobs_of_mine.small:single")["peak_bytes"] > 0


def test_a_script_named_like_a_module_takes_nobodys_place(script: Path) -> None:
    other = script.parent / "json.py"
    other.write_text("import torch\n\n\ndef make():\n    model = torch.nn.Linear(2, 2)\n")
    other.write_text(other.read_text() + "    return model, lambda x: model(x).sum(), torch.ones(1, 2)\n")
    assert answer("estimate", other)["peak_bytes"] > 0
    assert sys.modules["json"] is json and json.loads("1") == 1


# Progress and completion.


def shown_while_working(**options: bool) -> str:
    out = Output(**options)
    out._notes = Console(file=io.StringIO(), force_terminal=True)
    with out.working(2) as stage:
        stage("first")
        stage("second")
    return out._notes.file.getvalue()  # type: ignore[attr-defined]


def test_progress_is_for_terminals_and_can_be_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    assert "second" in shown_while_working()
    assert "second" not in shown_while_working(quiet=True)
    with Output().working(1) as stage:
        stage("first")
    assert capsys.readouterr() == ("", "")


def test_quiet_has_no_notes(script: Path, tmp_path: Path) -> None:
    words = ["plan", f"{script}:make", "--budget", "1GiB", "--fake", "-o", tmp_path / "plan.json"]
    assert "Written to" in invoke(*words).stderr
    sys.modules.pop("train")
    assert invoke(*words, "--quiet").stderr == "the script talks\n"


def test_completion(plan_file: Path) -> None:
    def complete(words: str, number: int) -> str:
        env = {"_LOWTIDE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        return invoke(env=env).stdout

    assert complete("lowtide ex", 1).split() == ["explain"]
    assert "1.up" in complete(f"lowtide explain {plan_file} 1.", 3).split()
    assert complete("lowtide explain nosuchfile 0.", 3).split() == []


# As people start it.


def test_in_a_process_of_its_own(script: Path) -> None:
    words = ["plan", f"{script.name}:make", "--budget", "1KiB", "--fake", "--json"]
    command = [sys.executable, "-m", "lowtide.cli", *words]
    script.write_text(SCRIPT.format(path="train.py"))
    env = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parent.parent)}  # also where it is not installed
    ran = subprocess.run(command, cwd=script.parent, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 3, ran.stderr
    assert json.loads(ran.stdout)["error"] == "InfeasibleBudgetError"
    assert ran.stderr.startswith("the script talks\nError: budget 1.0 KiB is below")


def test_without_its_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match="needs typer, which is not installed: pip install rich typer"):
        main()


def test_the_command_is_declared() -> None:
    assert 'lowtide = "lowtide.cli:main"' in (ROOT / "pyproject.toml").read_text()


def test_split_is_for_eager_steps_on_the_models_own_device(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    graph = lowtide.StepGraph((), 0, (), (), (), lowtide.Plan().hardware)
    monkeypatch.setattr(lowtide, "plan", lambda *_, **given: seen.append(given["split"]) or lowtide.Plan(graph=graph))
    assert invoke("plan", f"{script}:make", "--budget", "1GiB", "--split").exit_code == 0
    assert seen == [True]
    result = invoke("plan", f"{script}:make", "--budget", "1GiB", "--split", "--fake")
    assert result.exit_code != 0 and "--split" in result.stderr


def test_estimate_of_a_rank_of_a_large_job(script: Path) -> None:
    found = answer("estimate", f"{script}:make", "--world", "64", "--parallel", "fsdp=64", "--parallel", "fsdp=8")
    assert [row["layout"] for row in found["layouts"]] == [{"fsdp": 64}, {"ddp": 8, "fsdp": 8}]
    sizes = [row["static_bytes"]["parameters"] for row in found["layouts"]]
    assert 4 * sizes[0] < sizes[1] < 8 * sizes[0] and found["predicted"]  # uneven shards are padded
    assert invoke("estimate", f"{script}:make", "--parallel", "fsdp=8").exit_code == 2
    assert invoke("estimate", f"{script}:make", "--world", "8", "--parallel", "tp=8").exit_code == 2
    assert invoke("estimate", f"{script}:make", "--world", "8", "--budget", "1KiB").exit_code == 3
