"""Search for plans whose simulated peak fits a budget; entered through `lowtide.solvers.solve`.

`solve.solve` takes a traced `StepGraph` and a budget and returns a `Plan`. `eager_search` (regions that the eager
engine replays) and `compiled_search` (values that a compiled step saves) collect candidates from generators, one
generator per file, simulate them and return the fastest that fits. A generator produces decisions that do not depend on
the budget; the simulator assigns their peak and time, and the pair is a `candidate.Candidate`.

| file | produces | after |
|---|---|---|
| `hull` | the optimal regions for every price per byte, and a lower bound | Lagrangian relaxation (Everett 1963) |
| `interpolation` | candidates between neighbouring hull points | |
| `nesting` | regions inside regions | revolve (Griewank and Walther 2000) |
| `segment_search`, `chain_program` | regions that span runs of layers | rotor (Beaumont et al. 2019) |
| `baselines` | what users write with `torch.utils.checkpoint` | Chen et al. 2016 |
| `local_search` | other sets of regions, for steps of up to 3,000 ops | |
| `placement` | which values move to the host, and regions that retain outputs to move | |
| `compression` | which values are held encoded | |
| `min_cut` | the optimal values to save for every price, for compiled steps | minimum cut (Picard 1976) |
| `shared_budget` | variants of several compiled graphs under one budget | |

bench/results/solver.md measures what each of them contributes.
"""
