"""Compute the errors of projections on published steps outside of their fit, and the bands from these errors.

    python -m benchmarks.backtest [TABLE ...] [--rows] [--json] [--write-bands]

``--write-bands`` writes ``bands.json`` and ``software_constants.json`` of ``perfsuite/projection``, which ship.
"""
