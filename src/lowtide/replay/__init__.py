"""Drop and recompute: run a region's forward again in the backward, restore what it read, and check the result.

`region` is the engine; `checkpoint` and the eager engine's plans both call it. `recomputing` runs one call of a region
again and collects what it saves. `arguments`, `module_state`, `object_state`, `function_state` and `environment` each
capture and restore one part of what the forward read. `retained` keeps op outputs so that a replay need not
compute them, and `capture_profile` finds out where they are saved; `index_choices` repeats the results of `topk` and
the like. `divergence` holds the errors of a replay that does not repeat its forward. `layer_loop` and `layer_pass` are
`ActivationCheckpointer`, for layer loops without autograd.
"""
