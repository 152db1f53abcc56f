"""Estimators that one disturbed run does not carry away, and Student's quantiles."""
