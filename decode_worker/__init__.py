"""⑧ The decode role: it reserves, has the KV fetched, decodes and publishes. `role.py` decides, `build.py` wires."""
