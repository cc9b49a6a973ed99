"""A plan inside `torch.compile`."""
