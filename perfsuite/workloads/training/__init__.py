"""Training steps: the timed step, the untimed builds that inspect it, and its twin that one process checks."""
