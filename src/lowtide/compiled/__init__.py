"""The compiled engine: plans carried out inside `torch.compile`.

`backend` is what Dynamo calls for each graph. It makes a `planned_graph.PlannedGraph`, which is compiled in several
**variants**: versions of the same graph that save more or fewer tensors for the backward. The model's
`session.Session` says which variant each call runs. It predicts with `variant_choice` (and `other_memory`, for what
is not compiled), measures the first steps with `step_profile`, and decides by `settling`, on all ranks alike, what
the next step runs. `call_sequences` recognises steps that make the same calls as an earlier one. `compiled_handle` is
what the user gets.
"""
