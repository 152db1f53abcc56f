"""Connections to the ranks: processes of this host, or agents that a launcher started."""
