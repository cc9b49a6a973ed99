"""Snapshots: put a model, its gradients, buffers, attributes, optimizer and random states back as they were."""
