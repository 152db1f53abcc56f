"""The suite of performance cases inside an installed package: ``pytest --pyargs perfsuite.suite -k h100``.

``test_perf`` here is the folder ``test_perf`` of the repository: the cases have the same ids and the same baselines.
Journals, baselines and pages go to pytest's rootdir, which is where pytest was started or where its ini file is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
"""Folder of the package that holds ``test_perf``."""


def pytest_arguments(tests: Iterable[str], root: Path) -> list[str]:
    """Return the arguments by which pytest, started in ``root``, finds these tests.

    ``tests`` are files or node ids relative to ``root``.  One that ``root`` lacks and the package has is named by its
    module.

    >>> pytest_arguments(["test_perf/test_matmul.py::test_matmul"], Path("/nonexistent"))
    ['--pyargs', 'perfsuite.suite.test_perf.test_matmul::test_matmul']
    """
    found = []
    for test in tests:
        file, separator, name = test.partition("::")
        installed = file and not (root / file).exists() and (FOLDER / file).exists()
        module = ".".join(["perfsuite.suite", *Path(file).with_suffix("").parts])
        found.append(f"{module}{separator}{name}" if installed else test)
    return found if found == list(tests) else ["--pyargs", *found]


def runnable(command: str, root: Path | None = None) -> str:
    """Return a pytest command that also runs where the current folder (or ``root``) lacks the suite's tests.

    >>> runnable("pytest test_perf/test_kernels.py::test_kernel_launch -k h100", Path("/nonexistent"))
    'pytest --pyargs perfsuite.suite.test_perf.test_kernels::test_kernel_launch -k h100'
    """
    place = Path.cwd() if root is None else root
    return re.sub(r"\btest_perf\b[/\w.:]*", lambda test: " ".join(pytest_arguments([test[0]], place)), command)
