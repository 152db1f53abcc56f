"""Training steps: what is timed, what is looked at beside the time, and the twin that one process checks."""
