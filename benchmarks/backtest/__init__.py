"""How far projections are off on published steps that they were not fitted to, and the bands that follow from it.

    python -m benchmarks.backtest [TABLE ...] [--rows] [--json] [--write-bands]

``--write-bands`` writes ``perfsuite/projection/bands.json``, which is all of it that the product ships.
"""
