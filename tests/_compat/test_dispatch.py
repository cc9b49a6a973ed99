"""Canaries for `_compat/dispatch.py`: dispatch modes, schemas and tags say what traces and replays decide by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from lowtide._compat import dispatch, internals

aten = torch.ops.aten


class Listing(dispatch.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_see_ops() -> None:
    x = torch.ones(2)
    with Listing() as mode:
        x.exp()
        with dispatch.without_modes():
            x.sin()
        with dispatch.bare_kernels():
            x.cos()
    assert mode.ops == [aten.exp.default], "dispatch modes see other ops than those run under them"
    with dispatch.OpNames() as names:
        x.detach().exp()
    assert names.names == ["exp"], "bookkeeping ops are recorded"


def test_reads_are_guarded() -> None:
    x, refused = torch.ones(2), []
    with dispatch.ReadGuard([x], refused.append):
        x[0:1] + 1
    assert refused and refused[0] is x


@pytest.mark.parametrize("name", dispatch.BOOKKEEPING_NAMES)
def test_bookkeeping_ops_exist(name: str) -> None:
    assert internals.optional(f"torch.ops.{name}", None) is not None, (
        f"torch.ops.{name} is gone: traces may record its successor"
    )


def test_schemas_say_what_ops_do() -> None:
    assert dispatch.gives_views(aten.t.default) and not dispatch.gives_views(aten.exp.default), "op.is_view changed"
    assert dispatch.op_facts(aten.nonzero.default)[5], "nonzero is not tagged dynamic_output_shape"
    assert dispatch.returns_number(aten._local_scalar_dense.default), "the result of item() is no number"
    assert dispatch.op_facts(aten.dropout_.default)[2] == {0}, "schemas no longer mark arguments that are written"
    assert dispatch.op_facts(aten.bernoulli.default)[3], "bernoulli is not tagged nondeterministic_seeded"
    assert dispatch.op_arguments(aten.glu.default, [2], {}) == {"self": 2, "dim": -1}, "schemas have other defaults"
    assert dispatch.is_op(aten.mm) and dispatch.is_op_overload(aten.mm.default)


def test_flops_of_products() -> None:
    one, other = torch.ones(2, 3), torch.ones(3, 4)
    assert dispatch.op_flops(aten.mm.default, (one, other), {}, one @ other) == 2 * 2 * 3 * 4, "mm is counted otherwise"
    total = torch.ones(2, 4)
    assert dispatch.op_flops(aten.addmm_.default, (total, one, other), {"beta": 0}, total) == 2 * 2 * 3 * 4
    assert dispatch.op_flops(aten.exp.default, (one,), {}, one.exp()) == 0
    assert dispatch.op_flops(aten.exp_.default, (one,), {}, one) == 0


@pytest.mark.parametrize("kind", ["flash_attention", "efficient_attention", "cudnn_attention"])
@pytest.mark.parametrize("num_key_heads", [8, 2])
def test_flops_of_attention(kind: str, num_key_heads: int) -> None:
    """As torch counts it for as many key heads as query heads, and half of that if it is causal."""
    query, key = torch.empty(2, 8, 16, 4, device="meta"), torch.empty(2, num_key_heads, 16, 4, device="meta")
    forward = getattr(aten, f"_scaled_dot_product_{kind}")
    backward = getattr(aten, f"_scaled_dot_product_{kind}_backward")
    expected = flop_registry[forward](query, query, query)
    assert dispatch.op_flops(forward.default, (query, key, key), {}, query) == expected
    assert dispatch.op_flops(forward.default, (query, key, key), {"is_causal": True}, query) == expected // 2
    expected = flop_registry[backward](query, query, query, query)
    given = {"is_causal": False}
    assert dispatch.op_flops(backward.default, (query, query, key, key), given, query) == expected


def test_flops_of_attention_on_the_cpu() -> None:
    x = torch.empty(2, 8, 16, 4, device="meta")
    counted = dispatch.op_flops(aten._scaled_dot_product_flash_attention_for_cpu.default, (x, x, x), {}, x)
    assert counted == flop_registry[aten._scaled_dot_product_flash_attention](x, x, x)


def test_values_that_python_sees_are_recognised() -> None:
    x = torch.ones(2)
    assert dispatch.reveals_values(aten._local_scalar_dense.default, (x,), 1.0)
    assert dispatch.reveals_values(aten.nonzero.default, (x,), x)
    assert dispatch.reveals_values(aten.index.Tensor, (x, [x > 0]), x)
    assert not dispatch.reveals_values(aten.exp.default, (x,), x)


def test_autocast_casts_a_weight_once() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    assert not dispatch.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16), Listing() as mode:
        assert dispatch.is_any_autocast_enabled(), "_is_any_autocast_enabled is False under autocast"
        weight @ weight
        weight @ weight
    casts = [op for op in mode.ops if op is aten._to_copy.default]
    assert len(casts) == 1, "autocast no longer casts a weight by one _to_copy per block"
    assert dispatch.is_cast_of_weight(casts[0], (weight,))


def test_transforms_are_seen() -> None:
    seen = []
    torch.func.vmap(lambda x: (seen.append(dispatch.under_functorch()), x)[1])(torch.ones(2))
    assert seen == [True] and not dispatch.under_functorch(), "peek_interpreter_stack does not show transforms"


def test_outputs_are_taken_apart() -> None:
    parts, build = dispatch.flattened((torch.ones(1), [torch.zeros(1)]))
    assert len(parts) == 2 and isinstance(build(parts)[1], list)


@pytest.mark.gpu
def test_ops_that_synchronise_are_listed() -> None:
    x = torch.ones(2, device="cuda")
    with dispatch.SynchronizingOps(lambda: "here") as mode:
        (x + x).sum().item()
    assert [where for _, where in mode.found] == ["here"], "the error of sync debug mode has another text"
