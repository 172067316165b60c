"""How bytes of blocks get from one worker's pool into another's. `base` has the protocol, `select` the choice."""
