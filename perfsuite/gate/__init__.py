"""Judge runs against stored runs.  ``Row:`` of a constant: row and section of docs gate-evidence on its effect."""
