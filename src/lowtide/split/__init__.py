"""Split: run ops whose rows do not depend on each other a few rows at a time.

`lazy_logits` and `chunked_loss` do that for a model's output layer and loss, `token_slices` for modules that treat
every token alike. `split_forward` puts both on the modules of a model.
"""
