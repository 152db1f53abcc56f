"""Decides what runs are worth.  ``Row:`` of a constant: the row and section of docs gate that shows its effect."""
