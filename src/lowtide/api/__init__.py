"""The functions that a user calls, such as `fit`, `compile`, `estimate` and `max_batch`, one file each.

Each connects the other packages: it traces, solves, applies and measures. `measure` also has what several of them
share, the example steps with their trace, and `split_search` finds the modules that `split=True` runs in parts. Two
files are parts of `fit`: `plan_search` finds its candidates, `tuner` runs them and keeps one. `report` is what
`plan.report()` calls.
"""
