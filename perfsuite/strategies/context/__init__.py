"""Context parallelism: one sequence spread over the ranks of axis ``cp``, attention over all of its tokens.

What a driver asks stands in :mod:`.places` and needs no torch; ranks put their attention in by :mod:`.apply`.
"""
