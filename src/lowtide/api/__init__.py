"""The functions that a user calls, such as `fit`, `compile`, `estimate` and `max_batch`, one file each.

Each connects the other packages: it traces, solves, applies and measures. Parts that several share: `traced_step` has
the example steps and their trace, `split_search` finds the modules that `split=True` runs in parts. Two files are parts
of `fit`: `tuner` runs its candidates and keeps one, `fit_cache` remembers that one.
"""
