"""Driver, workers and transports: send a workload to the ranks and its figures back."""
