"""`plan_joint_graph`: plan a joint graph that another compiler made, and mark its nodes for that compiler to carry out.

`lowtide.compile` plans the graphs that Dynamo hands to its own backend. Trainers that trace forward and backward into
one fx graph by themselves, such as torchtitan's, want only the decisions: which forward nodes are saved and which are
recomputed, as `node.meta["recompute"]`, the mark that torch's own partitioner reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from lowtide import _compat
from lowtide.compiled.planned_graph import tag
from lowtide.plans.step_plan import Plan
from lowtide.solvers.solve import solve
from lowtide.tracing.devices import present_device, trace_device
from lowtide.tracing.joint_graph import joint_step, node_costs


def plan_joint_graph(
    joint: fx.Graph,
    budget: int | str,
    *,
    is_backward: Callable[[fx.Node], bool] | None = None,
    time_limit_s: float = 10.0,
) -> Plan:
    """Mark the forward nodes of `joint` as saved or recomputed, and return the plan.

    `budget` counts the values that the graph computes, gradients included; its inputs (parameters, the batch) are not
    among them. `is_backward` says which nodes belong to the backward; by default those that depend on an input whose
    name contains "tangents", as in AOTAutograd's graphs. Raises `InfeasibleBudgetError` if no choice meets the budget.
    If the graph meets it as it is, no node is marked.
    """
    values = [_compat.value_of(node) for node in joint.nodes if node.op == "placeholder"]
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))
    device = trace_device(torch.device("cpu") if device.type == "meta" else device)
    hardware = present_device(device)
    step = joint_step(joint, hardware, node_costs(hardware, device), is_backward=is_backward)
    plan = solve(step.graph, budget, engine="compiled", time_limit_s=time_limit_s)
    if plan.peak_bytes < plan.plain_peak_bytes:
        tag(step, frozenset(plan.kept_ops(step.graph)))
    return plan
