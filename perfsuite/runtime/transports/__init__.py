"""How ranks are reached: processes of this host, or agents that a launcher started."""
