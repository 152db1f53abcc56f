"""Compare the journals of many nodes: populations of equal nodes, and the verdict of each node and device."""
