"""One plan on every rank of a distributed job, over torch.distributed.

Ranks that decide differently wait for each other in collectives until a time-out. `ranks` lets them come to the same
decision, `agreement` to the same plan, and `data_parallel` handles models wrapped by `DistributedDataParallel`.
"""
