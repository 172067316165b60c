"""What both worker roles share around engine and kvtransfer: the Session server, grants, the host process.

- `ports.py`: what a role needs of its surroundings, and what a role is. The roles are plain classes between ports.
- `grants.py`: blocks granted under leases; who was refused and waits for room.
- `prompts.py`: prompts that come in segments.
- `outbox.py`, `session.py`: the server side of `WorkerService.Session`.
- `host.py`: one worker process: model, pool, step loop, listeners, drain, stop.
"""
