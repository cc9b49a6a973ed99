"""Drop and recompute: run a region's forward again in the backward, restore what it read, and check the result.

In the forward, `region.run` flattens the arguments (`arguments`), makes a `Frame` (`region`), which is the saved-tensor
hook that drops what autograd saves, and for each call a `ReplayableCall` (`recomputing`), which captures what the
forward reads. In the backward, the first saved tensor that is needed makes the frame replay its calls, with their
state restored, under hooks that collect the saved tensors. The frame compares these with the forward's; `divergence`
holds the errors.

What a forward reads is captured by `module_state` or `function_state`, which use `object_state`, and by `environment`.
All work alike: an object is made before the forward, and its `restore()` sets that state for a replay and returns a
function that sets the present state again.

`retained` keeps op outputs so that a replay need not compute them, and `capture_profile` finds out where they are
saved. `index_choices` repeats the results of `topk` and the like. Both decide by `op_facts`. `checkpoint` is the
interface of torch's checkpoint to the engine. `layer_loop` and `layer_pass` are `ActivationCheckpointer`, for layer
loops without autograd.
"""
