"""Performance over time: a line per session in a file, in the order of the commits, and their changes."""
