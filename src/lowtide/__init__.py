"""lowtide: train PyTorch models inside a memory budget.

`fit` traces a training step, plans it for a budget, and puts the fastest plan that holds on the model; `compile` does
so inside `torch.compile`. `trace`, `solve` and `apply` are the stages one by one.

Types that scripts only receive, and the parts for planning without a model, are in the packages: `lowtide.policies`,
`lowtide.errors`, `lowtide.plans`, `lowtide.simulator`, `lowtide.store` and `lowtide.eager`.
"""

from lowtide import hosts as hosts
from lowtide.api.compile import compile, handle_of
from lowtide.api.estimate import estimate, estimate_parallel
from lowtide.api.fit import fit, plan
from lowtide.api.fit_pipeline import fit_pipeline
from lowtide.api.max_batch import max_batch
from lowtide.api.measure import measure
from lowtide.eager import host_costs as _host_costs  # noqa: F401  # registers the engine's costs with the tracer
from lowtide.eager.handle import apply
from lowtide.errors import (
    CaptureError,
    CheckpointError,
    InfeasibleBudgetError,
    LowtideError,
    PlanError,
    StoreError,
    TraceError,
)
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.policies import EveryN, KeepAll, MaxBytes, RecomputeAll, Revolve, Selective, SqrtN, Uniform
from lowtide.replay.checkpoint import checkpoint
from lowtide.replay.layer_loop import ActivationCheckpointer
from lowtide.replay.recomputing import is_recomputing
from lowtide.solvers.solve import solve, sweep
from lowtide.store.activation_store import ActivationStore
from lowtide.store.offload import offload
from lowtide.tracing.trace import trace

__all__ = [
    "ActivationCheckpointer",
    "ActivationStore",
    "CaptureError",
    "CheckpointError",
    "EveryN",
    "InfeasibleBudgetError",
    "KeepAll",
    "LowtideError",
    "MaxBytes",
    "Plan",
    "PlanError",
    "RecomputeAll",
    "Revolve",
    "Selective",
    "SqrtN",
    "StepGraph",
    "StoreError",
    "TraceError",
    "Uniform",
    "apply",
    "checkpoint",
    "compile",
    "estimate",
    "estimate_parallel",
    "fit",
    "fit_pipeline",
    "handle_of",
    "is_recomputing",
    "max_batch",
    "measure",
    "offload",
    "plan",
    "solve",
    "sweep",
    "trace",
]

__version__ = "0.1.0"
