"""Journals of many nodes that never met: populations of equal nodes, and the standing of each node and device."""
