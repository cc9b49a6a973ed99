"""Drop and recompute: what the second run of a region restores, and how that run is checked.

`region` is the engine, used by `checkpoint` and by plans alike. `arguments`, `module_state`, `function_state` and
`environment` each restore one part of what the forward saw; `retained` lets a replay take op outputs that were kept;
`divergence` holds the errors of a replay that does not repeat its forward. `layer_loop` is the checkpointer of a layer
loop without autograd; `layer_pass`, `kept_states` and `captured` are its parts.
"""
