"""Timelines of pipelines for other programs and for eyes: traces and pictures."""
