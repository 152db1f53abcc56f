"""What a training step would take on machines that are not here, from what was measured on those that are."""
