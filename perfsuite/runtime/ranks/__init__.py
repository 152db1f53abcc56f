"""What runs in a rank process: a worker, its samples, spans and clocks.  torch is imported here."""
