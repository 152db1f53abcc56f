"""Driver, workers and transports: how a workload gets onto the ranks and its figures back."""
