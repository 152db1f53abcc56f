"""Decide each case by its runs.  ``Row:`` of a constant is the row and section of docs gate-evidence on its effect."""
