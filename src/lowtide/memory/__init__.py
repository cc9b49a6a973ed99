"""What holds, moves and brings back activations. Knows nothing of plans."""
