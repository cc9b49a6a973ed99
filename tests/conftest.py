from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch

from distributed.jobs import FEWEST_STEPS
from kernelless import Compiler
from lowtide import _compat
from lowtide.api import tuner
from lowtide.compiled import planned_graph, session
from lowtide.solvers import eager_search, solve
from lowtide.tracing import devices
from lowtide.tracing import trace as tracing
from lowtide.tracing.host_speed import REFERENCE_S

# What is measured once per machine is kept here, also by processes that tests start: never in somebody's home. Workers
# of pytest-xdist share that of the process which started them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["LOWTIDE_CACHE_DIR"] = tempfile.mkdtemp(prefix="lowtide-tests-")
devices.register(lambda _: devices.ENGINE_COSTS._replace(move_s=0.0))  # measuring takes seconds; the CPU moves nothing
tracing.probe_s = lambda: REFERENCE_S  # the same costs on a busy machine


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> None:
    """accelerate keeps the options of the first accelerator for the whole process."""
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(True)


@pytest.fixture
def unchanged_debug_logger() -> Iterator[None]:
    """torch's debug mode leaves its logger so that pytest reads it in the next test, and cannot format its records."""
    logger = logging.getLogger("LoggingTensor")
    level, propagate = logger.level, logger.propagate
    yield
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Workspaces of kernels depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _short_traces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record steps as few times as a graph can be made of: what more recordings find out is tested in `tracing`.

    Whether a plain step fits in free memory, which a fake trace says first, is of no concern but there and in `api`.
    """
    package = request.path.parent.name
    if package != "tracing" and request.path.name != "test_snapshot.py":  # which interrupts every step
        for name, num in FEWEST_STEPS.items():
            monkeypatch.setattr(tracing, name, num)
    if package not in ("tracing", "api"):
        monkeypatch.setattr(tracing, "_trace_auto", tracing._trace_real)


@pytest.fixture
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search as in a step of many ops, for tests to which any plan will do."""
    monkeypatch.setattr(eager_search, "MOST_OPS", 0)


@pytest.fixture
def quick_fit(monkeypatch: pytest.MonkeyPatch, quick_search: None) -> None:
    """Let `fit` run few candidates, which take turns once, and `sweep` few budgets, where any of them will do.

    The search leaves out segments and nested candidates, which take most of its time in a small step.
    """
    monkeypatch.setattr(eager_search.EagerSearch, "segmenting", None)
    monkeypatch.setattr(eager_search.EagerSearch, "_sample_budgets", [])
    monkeypatch.setattr(solve, "_MOST", 3)
    monkeypatch.setattr(solve, "_NUM_BUDGETS", 4)
    monkeypatch.setattr(tuner, "_MAX_RATIOS", tuner._MAX_RATIOS[:2])


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """In place of inductor: graphs split as they would be, every op run as it is.

    Torch's partitioner is asked at two fractions, as each takes as long as all the rest of a small graph. Dynamo does
    not time its guards, for which it flushes the caches of the processor first.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
    made = Compiler()
    monkeypatch.setattr(_compat, "compile_with_inductor", made)
    monkeypatch.setattr(planned_graph, "FRACTIONS", (0.5, 0.05))
    monkeypatch.setattr(session, "MEASURES_CPU", False)  # ops run one by one need more memory than inductor's kernels
    yield made
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _frozen_imports() -> None:
    """Spare garbage collections, one for each measurement, a look at all that was imported and cached before."""
    if len(gc.get_objects()) > 20_000:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
