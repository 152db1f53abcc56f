"""Charts as Vega-Lite specifications: plain data in, plain data out, no drawing.

Colours are exact, so that a rule of the page's style sheet can turn each into that of the dark scheme.
"""
