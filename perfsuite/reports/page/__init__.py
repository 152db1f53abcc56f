"""One HTML page of a run: a file that opens offline, with text, tables and charts without need of script or style."""
