"""Whether a plan was made for this model."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lowtide.engines import _compat
from lowtide.errors import PlanError
from lowtide.plans import Plan, PlannedModule


def modules_for(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """The model's modules by path. Raises `PlanError` with what differs if the plan was made for another model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    recomputed = [path for region in plan.regions for path in region.paths]
    paths = dict.fromkeys(recomputed + [move.path for move in plan.moves] + list(plan.choosers))
    missing = [path for path in paths if path not in modules]
    if missing:
        raise PlanError(
            f"the plan recomputes, moves or keeps values of {missing[0]!r}, and this model has no such module: it is "
            f"for another. {len(missing)} of its {len(paths)} modules are missing, such as {', '.join(missing[:3])}"
        )
    for planned in plan.modules:
        if planned.path in modules:
            difference = _difference(planned, modules[planned.path])
            if difference is not None:
                raise PlanError(
                    f"the plan was made for another model: {planned.path or 'the model'} {difference}. "
                    "Plan for this one: lowtide.plan(model, ...)"
                )
    if plan.graph is not None:
        plan.calls(plan.graph)  # raises where a region cannot be recomputed
    return modules


def with_parameters(plan: Plan, model: nn.Module) -> Plan:
    """The plan, with the parameters of the modules it is about, so that it can tell a model of another size."""
    modules = dict(model.named_modules(remove_duplicate=False))
    seen = tuple(
        replace(planned, num_parameters=count, num_elements=elements)
        for planned in plan.modules
        for count, elements in [_parameters(modules[planned.path])]
    )
    return replace(plan, modules=seen)


def _difference(planned: PlannedModule, module: nn.Module) -> str | None:
    # Some wrap a module by a class derived from its own (FSDP2, parametrizations): it is still that module.
    if planned.kind not in {kind.__name__ for kind in type(module).__mro__}:
        return f"was a {planned.kind} and is a {type(module).__name__} here"
    count, elements = _parameters(module)
    if not count or not planned.num_parameters or (count, elements) == (planned.num_parameters, planned.num_elements):
        return None
    return (
        f"had {planned.num_parameters} parameters of {planned.num_elements:,} elements and has {count} of {elements:,}"
    )


def _parameters(module: nn.Module) -> tuple[int, int]:
    """How many there are and their elements; (0, 0) where they are sharded, and what is here is a part."""
    parameters = list(module.parameters())
    if any(_compat.is_sharded(parameter) for parameter in parameters):
        return 0, 0
    return len(parameters), sum(parameter.numel() for parameter in parameters)
