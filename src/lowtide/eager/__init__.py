"""The eager engine: policies and plans carried out on a live `nn.Module`."""
