"""Context parallelism: the ranks of axis ``cp`` share a sequence and attend over all of its tokens.

:mod:`.places` needs no torch and serves the driver; :mod:`.apply` changes the model on the ranks.
"""
