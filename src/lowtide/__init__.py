"""lowtide: train inside a memory budget."""

from lowtide.api.compile import compile, explain_compiled
from lowtide.api.estimate import Estimate, estimate
from lowtide.api.fit import fit, plan
from lowtide.api.max_batch import max_batch
from lowtide.api.measure import Measured, measure
from lowtide.eager import host_costs as _hostcosts  # noqa: F401  # which traces ask what the engine costs
from lowtide.eager.handle import Applied, apply
from lowtide.errors import (
    CapacityError,
    CaptureError,
    ChangedInPlaceError,
    CheckpointError,
    GraphError,
    InfeasibleBudgetError,
    LowtideError,
    PlanError,
    StoreError,
    TraceError,
    UnitError,
)
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Frontier, Plan
from lowtide.policies import (
    EveryN,
    KeepAll,
    MaxBytes,
    Policy,
    RecomputeAll,
    Revolve,
    Segment,
    Segments,
    Selective,
    SqrtN,
    Uniform,
    plan_recomputation,
)
from lowtide.replay.checkpoint import checkpoint
from lowtide.replay.layer_loop import ActivationCheckpointer
from lowtide.replay.recomputing import is_recomputing
from lowtide.simulator.timeline import Timeline, simulate
from lowtide.solvers.solve import solve, sweep
from lowtide.store.activation_store import ActivationStore, Missing
from lowtide.store.offload import offload
from lowtide.tracing.trace import trace

__all__ = [
    "ActivationCheckpointer",
    "ActivationStore",
    "Applied",
    "CapacityError",
    "CaptureError",
    "ChangedInPlaceError",
    "CheckpointError",
    "Estimate",
    "EveryN",
    "Frontier",
    "GraphError",
    "InfeasibleBudgetError",
    "KeepAll",
    "LowtideError",
    "MaxBytes",
    "Measured",
    "Missing",
    "Plan",
    "PlanError",
    "Policy",
    "RecomputeAll",
    "Revolve",
    "Segment",
    "Segments",
    "Selective",
    "SqrtN",
    "StepGraph",
    "StoreError",
    "Timeline",
    "TraceError",
    "Uniform",
    "UnitError",
    "apply",
    "checkpoint",
    "compile",
    "estimate",
    "explain_compiled",
    "fit",
    "is_recomputing",
    "max_batch",
    "measure",
    "offload",
    "plan",
    "plan_recomputation",
    "simulate",
    "solve",
    "sweep",
    "trace",
]

__version__ = "0.1.0"
