"""Robust estimators, and Student's quantiles."""
