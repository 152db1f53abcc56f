"""Judge runs against stored runs.  ``Row:`` of a constant: the row and section of docs gate that shows its effect."""
