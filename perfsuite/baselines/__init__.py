"""What was measured before, what is published, and what follows for what is measured now.

``store`` reads and writes the files, ``gate`` decides what a session's runs are worth against them, ``physics`` what no
true measurement can be; ``published`` and ``audit`` are about tables of other people.
"""
