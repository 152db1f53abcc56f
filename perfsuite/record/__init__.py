"""The record of a measured case and of a run: it imports base/ alone."""
