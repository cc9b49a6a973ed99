"""Random training programs under every engine of lowtide, judged by the same program run plainly.

One file per step: `features` are the building blocks of models, `programs` draws a program from a seed and builds it
from its spec, `engines` runs a program under one engine, `judge` compares that with the plain run, `shrink` makes a
failing spec smaller, and `python -m fuzz` is the command. Everything uses lowtide's public names only, apart from the
compiler without kernels that the compiled backend's own tests use too.
"""
