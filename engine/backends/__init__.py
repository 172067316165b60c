"""What computes a step on a device. `cpu` is the oracle and the embedded default."""
