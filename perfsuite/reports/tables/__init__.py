"""Results in the tables of the published reports."""
