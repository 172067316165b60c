"""Moving KV between workers: pool regions, leases, ⑥ the sender, ⑦ the receiver, transports. Torch-free."""
