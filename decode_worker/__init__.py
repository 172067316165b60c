"""⑧ The decode role: reservations, joining the batch, publishing steps. `role.py` decides, `build.py` wires."""
