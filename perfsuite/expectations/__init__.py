"""Expected figures of healthy devices, with sources, and the verdict of a result against them."""
