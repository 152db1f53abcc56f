"""Commands of perfsuite as a user calls them: what one prints, or the line in which it refuses."""

from __future__ import annotations

import json
from typing import Any

from perfsuite.cli.main import EXIT_OK, EXIT_USAGE, main


def run(capsys: Any, *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as end:
        code = int(end.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def printed(capsys: Any, *words: object, code: int = EXIT_OK) -> str:
    found, out, err = run(capsys, *words)
    assert code == found, err
    return out


def as_json(capsys: Any, *words: object, code: int = EXIT_OK) -> Any:
    return json.loads(printed(capsys, *words, "--json", code=code))


def refused(capsys: Any, *words: object) -> str:
    """The one line in which a command refuses; nothing else is printed."""
    code, out, err = run(capsys, *words)
    assert (EXIT_USAGE, "", 1) == (code, out, err.count("\n")), out + err
    return err
