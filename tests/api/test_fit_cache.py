"""The file in which `fit` remembers plans: what is read from it, and what is not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowtide
from api.tuned_job import Clock, Job
from lowtide.api import measure
from lowtide.api.measure import TracedStep
from lowtide.api.plan_search import FORMAT, FitCache
from lowtide.api.split_search import SplitSearch
from lowtide.eager.replanning import Limits
from sweeps import sweep

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called on, a search is an error."""

    def searched(*args: Any) -> Any:
        raise AssertionError("a search")

    return lambda: monkeypatch.setattr(Limits, "candidates", searched)


@pytest.mark.usefixtures("quick_fit")
def test_the_cache_gives_the_plan_that_was_kept(
    job: Job, tmp_path: Path, clock: type[Clock], no_search: Callable[[], None]
) -> None:
    clock.part_s, budget, cache = 10.0, job.budget(0.5), tmp_path / "fit.json"
    with job.fit(budget, cache=cache) as handle:
        kept, text = handle.plan, cache.read_text()
    (entry,) = json.loads(text)["entries"].values()
    assert [row["name"] for row in entry["candidates"]] == [trial.name for trial in handle.candidates]
    no_search()
    for path in (cache, str(cache)):
        with job.fit(budget, cache=path) as handle:
            assert (handle.plan.regions, handle.plan.moves) == (kept.regions, kept.moves)
            assert [trial.name for trial in handle.candidates] == ["kept before"]
            assert handle.measured_peak_bytes == kept.measured_peak_bytes and handle.plan.rows == kept.rows
            assert handle.plan.peak_bytes == kept.peak_bytes and handle.plan.graph is not None
    assert cache.read_text() == text
    for options in ({"budget": budget + 1}, {"budget": budget, "lossy": "int8"}):
        with pytest.raises(AssertionError, match="a search"):
            job.fit(cache=cache, **options)


def test_the_bound_of_a_remembered_plan_is_for_the_times_of_today(job: Job, tmp_path: Path) -> None:
    budget, cache = job.budget(0.3), tmp_path / "fit.json"
    job.fit(budget, cache=cache, tune_s=0).remove()
    content = json.loads(cache.read_text())
    (entry,) = content["entries"].values()
    plan = json.loads(entry["plan"])
    for name in ("step_s", "extra_s", "lower_bound_s"):  # of a machine that was busy
        plan[name] *= 100
    entry["plan"] = json.dumps(plan)
    cache.write_text(json.dumps(content))
    with job.fit(budget, cache=cache, tune_s=0) as handle:
        assert [trial.name for trial in handle.candidates] == ["kept before"]
        bound_s = lowtide.solve(handle.plan.graph, budget, time_limit_s=1).lower_bound_s
        assert 0 < handle.plan.lower_bound_s <= bound_s < handle.plan.extra_s


@pytest.mark.usefixtures("quick_fit")
def test_a_remembered_plan_that_no_longer_holds(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    budget, cache, honest = job.budget(0.6), tmp_path / "fit.json", measure.RealSteps._whole_peak
    with job.fit(budget, cache=cache) as handle:
        kept = handle.plan
    more = 1.02 * budget / kept.measured_peak_bytes
    monkeypatch.setattr(measure.RealSteps, "_whole_peak", lambda *args: int(more * honest(*args)))
    with job.fit(budget, cache=cache) as handle:
        assert handle.plan.regions != kept.regions and handle.measured_peak_bytes <= budget
        learned = handle.plan
    with job.fit(budget, cache=cache) as handle:  # which is what the cache has now
        assert handle.plan.regions == learned.regions
        assert [trial.name for trial in handle.candidates] == ["kept before"]
    assert not caplog.records


@pytest.mark.parametrize(
    "text", sweep(["{", '{"format": "another"}', '{"format": "lowtide fit cache"}', "", "[]", "3", "\0"], keep=3)
)
def test_a_file_that_is_no_cache(job: Job, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "fit.json"
    cache.write_text(text)
    job.fit(job.budget(0.6), cache=cache, tune_s=0).remove()
    (message,) = (record.getMessage() for record in caplog.records)
    assert f"the cache {cache} is not used, and left as it is: it " in message
    assert cache.read_text() == text


@pytest.mark.usefixtures("quick_fit")
def test_a_damaged_entry_and_a_folder_that_is_not_there(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget, cache = job.budget(0.6), tmp_path / "fit.json"
    job.fit(budget, cache=cache, tune_s=0).remove()
    whole = json.loads(cache.read_text())
    (key,) = whole["entries"]
    entry = whole["entries"][key]
    for damage in (None, {}, {"plan": "{", "correction_bytes": 0}, {**entry, "correction_bytes": "1"}):
        cache.write_text(json.dumps({**whole, "entries": {key: damage}}))
        caplog.clear()
        job.fit(budget, cache=cache, tune_s=0).remove()
        (message,) = (record.getMessage() for record in caplog.records)
        assert "has a damaged entry for this step" in message
        assert set(json.loads(cache.read_text())["entries"][key]) == {"plan", "correction_bytes", "candidates"}
    plan = json.loads(entry["plan"])
    plan["regions"] = [{"path": "layers.99", "nth": 0, "keep_ops": [], "more": []}]  # of another model
    cache.write_text(json.dumps({**whole, "entries": {key: {**entry, "plan": json.dumps(plan)}}}))
    caplog.clear()
    job.fit(budget, cache=cache, tune_s=0).remove()
    assert "has a damaged entry for this step" in caplog.records[0].getMessage()
    caplog.clear()
    job.fit(budget, cache=tmp_path / "not there" / "fit.json", tune_s=0).remove()
    (message,) = (record.getMessage() for record in caplog.records)
    assert "cannot be written" in message


def test_several_writers_leave_a_whole_file(job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, plan = tmp_path / "fit.json", lowtide.solve(job.graph, job.budget(0.6))
    done = threading.Event()
    splits = SplitSearch(TracedStep(job.model, job.loss_fn, [(job.batch,)], None, job.graph), Limits())

    def write(number: int) -> None:
        cache = FitCache(path, splits, number)
        for _ in range(20):
            cache.write(plan, 0, ())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    reader = FitCache(path, splits, 99)

    def read() -> None:
        while not done.is_set():
            assert reader.read() is None

    watching = threading.Thread(target=read)
    for thread in (watching, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watching.join()
    assert not caplog.records  # no reader has seen half a file
    assert json.loads(path.read_text())["format"] == FORMAT
    assert [each.name for each in tmp_path.iterdir()] == ["fit.json"]
