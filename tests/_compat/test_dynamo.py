"""Canaries for `_compat/dynamo.py`: what keeps Dynamo out of hooks, and what the compiled engine calls.

Compilation itself is tested in tests/compiled; the names that it needs are in test_internals.py.
"""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import nn

from lowtide._compat import dynamo


def test_functions_are_skipped_without_a_wrapper() -> None:
    def function() -> int:
        return 1

    assert dynamo.never_compiled(function) is function, "set_code_exec_strategy is gone: hooks run through a wrapper"
    assert dynamo.disable_dynamo(function)() == 1


@pytest.mark.filterwarnings("ignore")  # those of importing inductor
def test_options_of_inductor_are_known() -> None:
    assert dynamo.is_inductor_option("max_autotune") and not dynamo.is_inductor_option("no_such_option")
    assert dynamo.mode_options("reduce-overhead", None).get("triton.cudagraphs"), "modes have other options"
    assert dynamo.mode_options(None, None) == {}


@pytest.mark.filterwarnings("ignore")
def test_modules_are_compiled_and_uncompiled() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        with dynamo.TracingContext():
            return graph.forward

    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    expected = model(x)
    dynamo.compile_module(model, backend=backend)
    assert dynamo.is_compiled_module(model)
    assert torch.equal(model(x), expected) and len(graphs) == 1, "_compiled_call_impl no longer replaces the call"
    dynamo.uncompile(model)
    assert not dynamo.is_compiled_module(model)
    assert torch.equal(model(x), expected) and len(graphs) == 1, "_compiled_call_impl = None no longer undoes it"


@pytest.mark.filterwarnings("ignore")
def test_functions_that_dynamo_stops_compiling_are_reported() -> None:
    reports: list[tuple[str, str]] = []
    traced: list[set[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        traced.append(dynamo.traced_functions())
        return graph.forward

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    watch = dynamo.LimitWatch(lambda function, limit: reports.append((function, limit)))
    watch.attach()
    try:
        torch._dynamo.reset()
        with torch._dynamo.config.patch(recompile_limit=1):
            for num in (2, 3):
                torch.compile(doubled, backend=backend, dynamic=False)(torch.ones(num))
    finally:
        logging.getLogger(watch._LOGGER).removeHandler(watch)
        torch._dynamo.reset()
    ((function, limit),) = reports
    assert limit == "recompile_limit" and function in traced[0], "the message of convert_frame.py has changed"


@pytest.mark.filterwarnings("ignore")  # those of importing inductor
def test_the_options_of_a_compiled_module() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: object, options: object = None) -> object:
        return graph.forward

    options, model = {"budget": 1}, nn.Linear(2, 2)
    compiled = torch.compile(model, backend=backend, options=options)
    assert dynamo.backend_options(compiled) == options, "the chain of _torchdynamo_orig_backend ends elsewhere"
    assert dynamo.backend_options(model) is dynamo.backend_options(torch.compile(model)) is None


@pytest.mark.filterwarnings("ignore")
def test_wrappers_of_modules() -> None:
    with dynamo.without_bucket_graphs():
        assert torch._dynamo.config.optimize_ddp, "no model runs inside of DistributedDataParallel"
    assert hasattr(nn.parallel.DistributedDataParallel, "_get_active_ddp_module")


@pytest.mark.filterwarnings("ignore")
def test_the_lock_is_held_while_dynamo_compiles() -> None:
    is_free: list[bool] = []

    def try_lock() -> None:
        is_free.append(dynamo.compile_lock().acquire(blocking=False))  # type: ignore[attr-defined]

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()
        return graph.forward

    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert is_free == [False], "Dynamo's compile_lock is elsewhere"
