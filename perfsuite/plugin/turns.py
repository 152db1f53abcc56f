"""Run items of an arm in turns that the gate requests; the gate copies this file to the arm, which may be older.

The arm process runs until the last turn, so pytest starts and torch is imported once.  ``PERFSUITE_TURNS`` has two file
descriptors: lines with the node ids of a turn come from the first; ``ready`` and ``done`` go to the second.
"""

from __future__ import annotations

import json
import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the items of each line until there are no more lines."""
    if session.testsfailed or not session.items:
        return None  # pytest's own loop prints the reason
    source, target = (int(word) for word in os.environ["PERFSUITE_TURNS"].split(","))
    items = {item.nodeid: item for item in session.items}
    with os.fdopen(source) as lines, os.fdopen(target, "w", buffering=1) as answers:
        answers.write("ready\n")
        for line in lines:
            turn = [items[node] for node in json.loads(line) if node in items]
            for item, following in zip(turn, [*turn[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
            answers.write("done\n")
    return True
