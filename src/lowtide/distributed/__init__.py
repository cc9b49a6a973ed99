"""One plan on every rank of a distributed job, over torch.distributed."""
