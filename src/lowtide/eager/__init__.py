"""The eager engine: policies and plans carried out on a live `nn.Module`.

`handle.Applied` patches the modules that a policy names, `plan_handle.AppliedPlan` those of a plan; `calls` runs their
calls in regions (`replay`), and `moves` holds values off the device (`store`). A handle of `lowtide.fit` also makes
plans for larger inputs (`replanning`), and warns when the budget no longer holds or recovers from running out of memory
(`over_budget`). `captured_step` and `cuda_graph` run a planned step as a CUDA graph. `host_costs`
measures what the engine costs the host, for the solvers.
"""

from lowtide.eager.handle import Applied

__all__ = ["Applied"]
