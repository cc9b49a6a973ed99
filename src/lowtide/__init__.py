"""lowtide: train inside a memory budget."""

from lowtide.engines import hostcosts as _hostcosts  # noqa: F401  # which traces ask what the engine costs
from lowtide.engines.batches import max_batch
from lowtide.engines.compiled import compile, explain_compiled
from lowtide.engines.eager import Applied, apply
from lowtide.engines.fitting import fit, plan
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
from lowtide.graph import StepGraph
from lowtide.memory.measuring import Measured, measure
from lowtide.memory.offload import offload
from lowtide.memory.store import ActivationStore, Missing
from lowtide.plans import Plan
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
from lowtide.simulator import Timeline, simulate
from lowtide.solvers.solving import solve
from lowtide.solvers.sweeping import Frontier, sweep
from lowtide.tracing.eager import trace
from lowtide.tracing.estimating import Estimate, estimate

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
