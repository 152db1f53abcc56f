"""Figures that healthy devices reach, with their sources, and the verdict of a result against them."""
