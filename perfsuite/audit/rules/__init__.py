"""Plausibility rules, one file per family; each stands beside what it is called and how severe it is."""
