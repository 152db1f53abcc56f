"""Timelines of pipelines as traces for other programs and as pictures."""
