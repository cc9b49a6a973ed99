"""Turn one training step into a `StepGraph`.

`trace` runs a step on real or fake tensors and records its ops, saved tensors and module calls; `joint_graph` reads
the same from AOTAutograd's joint graph for compiled models. The other modules measure or predict what ops cost.
"""
