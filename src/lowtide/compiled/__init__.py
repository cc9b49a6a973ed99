"""The compiled engine: plans carried out inside `torch.compile`.

`backend` is what Dynamo calls for each graph. It makes a `planned_graph.PlannedGraph`, which compiles variants that
save different tensors; the model's `session.Session` says which variant each call runs. The session predicts with
`variant_choice` (and `other_memory`, for what is not compiled), measures the first steps with `step_profile`, and
decides by `settling`, on all ranks alike, what the next step runs; `call_sequences` tells the steps apart.
`compiled_handle` is what the user gets.
"""
