"""The gate: from stored runs and this session's to a verdict per case.  It decides and never measures."""
