"""A training step, watched."""
