"""A plan on a live `nn.Module`."""
