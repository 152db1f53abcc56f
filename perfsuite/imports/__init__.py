"""Figures that other tools measured, read from their logs: beside ours under their own label, never a baseline."""
