"""The functions a user calls (fit, plan, compile, estimate, measure, max_batch), one file each.

Each connects the other packages: it traces, solves, applies and measures, and has no algorithm of its own.
"""
