"""⑤ The prefill role: prefill in chunks, the first token, ⑥ offers. `role.py` decides, `build.py` wires."""
