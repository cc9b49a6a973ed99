"""Put a model, its gradients, buffers, optimizer and random states back as they were."""
