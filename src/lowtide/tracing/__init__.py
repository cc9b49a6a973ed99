"""Turn one training step into a `StepGraph`.

`trace` runs a step on real or fake tensors and records its ops, saved tensors and module calls; `joint_graph` reads the
same from AOTAutograd's joint graph for compiled models. `recorder` fills `trace_records` while the step runs, and
`fakes` makes its fake tensors. `op_times`, `untraced_memory` and `devices` measure or predict what ops cost.
`step_checks` refuses steps that cannot be traced, and `model_blocks` finds the layers of a model.
"""
