"""The compiled engine: plans carried out inside `torch.compile`."""
