"""Code of a rank process: a worker, and the modules that it needs."""
