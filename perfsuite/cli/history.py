"""``perfsuite history``: store and search results over time, in the order of the commits."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural
from perfsuite.baselines.runs import days_before
from perfsuite.cli.main import EXIT_FOUND, Command, exit_codes, print_lines
from perfsuite.history import file
from perfsuite.history.describe import list_lines, show_lines
from perfsuite.history.file import session_of
from perfsuite.history.findings import Findings, searched
from perfsuite.history.git import Repository
from perfsuite.metrics import read_run
from perfsuite.record.run import Revision
from perfsuite.reports.beside_others import OverTime
from perfsuite.statistics.change_points import LEAST_VALUES as LEAST_SESSIONS

DEFAULT = Path("perf-history.jsonl")
_FILE: Mapping[str, Any] = {"type": Path, "default": DEFAULT, "metavar": "FILE"}
_FOUND = "show --fail-on found such a change"


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list the sessions: time, commit, branch, cases")
    show = actions.add_parser("show", help="print changes with their commits, and the sum of small changes")
    add = actions.add_parser("add", help="add the sessions of journals")
    merge = actions.add_parser("merge", help="add the sessions of other histories to FILE")
    prune = actions.add_parser("prune", help="drop old sessions, sessions by id, or cases")
    for parser_of in (listing, show, prune):
        verb = "change" if parser_of is prune else "read"
        parser_of.add_argument("path", nargs="?", help=f"{verb} this history (default: {DEFAULT})", **_FILE)
    show.add_argument("--branch", default="", metavar="NAME", help="order sessions by this branch (default: HEAD's)")
    show.add_argument("--case", default="", metavar="TEXT", help="search cases whose id contains TEXT (default: all)")
    show.add_argument("--since", default="", metavar="REV", help="print changes after this revision (default: all)")
    show.add_argument(
        "--host",
        default="",
        metavar="NAME",
        help="search sessions of this host only, or of all (default: the host with most sessions)",
    )
    show.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts to FILE too (default: none)")
    show.add_argument(
        "--fail-on",
        metavar="CHANGE",
        help="exit with 1 for a change of this kind: slower, any, or slower by at least a share such as 3%% "
        "(default: never)",
    )
    add.add_argument("journals", nargs="+", type=Path, metavar="JOURNAL", help="add these journals")
    add.add_argument("--history", dest="path", help=f"add to this history (default: {DEFAULT})", **_FILE)
    add.add_argument(
        "--commit", default="", metavar="REV", help="set the measured revision of journals without one (default: none)"
    )
    add.add_argument("--branch", default="", metavar="NAME", help="set the branch (default: as in the journal)")
    merge.add_argument("path", type=Path, metavar="FILE", help="write the union into this history")
    merge.add_argument("others", nargs="+", type=Path, metavar="OTHER", help="add these histories of the same hardware")
    prune.add_argument("--older-than", type=float, metavar="DAYS", help="drop sessions older than DAYS (default: none)")
    prune.add_argument(
        "--session", action="append", default=[], metavar="ID", help="drop this session; repeatable (default: none)"
    )
    prune.add_argument(
        "--case", default="", metavar="PATTERN", help="drop cases whose id matches a shell pattern (default: none)"
    )
    prune.add_argument("--dry-run", action="store_true", help="print the changes without making them")
    for parser_of in (show, add):
        parser_of.add_argument(
            "--repository", type=Path, default=Path(), metavar="DIR", help="read commits of DIR (default: here)"
        )
    for parser_of in (listing, show, add, merge, prune):
        parser_of.epilog = exit_codes(_FOUND if parser_of is show else "")


def _run(options: argparse.Namespace) -> int | None:
    if options.action == "list":
        print_lines(list_lines(file.read(options.path)))
        return None
    actions = {"show": _show, "add": _add, "merge": _merge, "prune": _prune}
    return actions[options.action](options)


def _show(options: argparse.Namespace) -> int | None:
    least = _least_of(options.fail_on)
    history = file.read(options.path)
    findings = searched(
        history.sessions,
        Repository(root=options.repository),
        options.branch,
        options.case,
        options.since,
        host=options.host,
    )
    print_lines(show_lines(history, findings))
    if options.html is not None:
        from perfsuite.reports.page.page import page_line, write_history

        write_history(OverTime(history=history, findings=findings), options.html)
        print(f"\npage {page_line(options.html)}")
    if least is None:
        return None
    changed = [change.ratio for change in findings.changes] + [one.ratio for one in findings.accumulated]
    ratios = [ratio.value - 1 for ratio in changed]
    if any(ratio > 0 and ratio >= least for ratio in ratios) or (options.fail_on == "any" and ratios):
        return EXIT_FOUND
    _require_searched(findings, options.path)
    return None


def _require_searched(findings: Findings, path: Path) -> None:
    if (most := findings.most_sessions) < LEAST_SESSIONS:
        raise ConfigurationError(
            f"--fail-on: nothing was searched in {path}: a change needs {LEAST_SESSIONS} sessions of a case on the "
            f"branch with equal settings, and no case has more than {most}; add sessions, or leave --fail-on out"
        )
    if findings.nothing_since:
        raise ConfigurationError(
            f"--fail-on: nothing was searched in {path}: no session has a commit after {findings.since}; add one, or "
            "leave --since out"
        )


def _least_of(written: str | None) -> float | None:
    """Return the smallest slowdown that fails, as a share; None without --fail-on.  Raises ConfigurationError."""
    if written is None:
        return None
    if written in ("slower", "any"):
        return 0.0
    try:
        share = float(written.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not (written.endswith("%") and 0 < share < 10):
        raise ConfigurationError(f"--fail-on={written} is not valid; write slower, any, or a share such as 3%")
    return share


def _add(options: argparse.Namespace) -> None:
    repository = Repository(root=options.repository)
    asked = repository.revision(options.commit) if options.commit else Revision()
    for path in options.journals:
        run = read_run(path)
        recorded = run.revision if run.revision.commit else asked
        session = session_of(
            (result for result in run.results.values() if result.session in ("", run.session)),
            session=run.session,
            time=run.started_at,
            platform=run.platform,
            fingerprint=run.fingerprint,
            revision=dataclasses.replace(recorded, branch=options.branch or recorded.branch),
        )
        if not session.cases:
            raise ConfigurationError(f"{path}: nothing was measured, so there is nothing to add")
        done = "added" if file.append(options.path, session) else "is there already"
        print(f"{options.path}: session {session.session} with {plural(len(session.cases), 'case')} {done}")


def _merge(options: argparse.Namespace) -> None:
    history, new = file.merge(options.path, options.others)
    print(f"{options.path}: {len(history.sessions)} sessions, {new} new")


def _prune(options: argparse.Namespace) -> None:
    if options.older_than is None and not options.session and not options.case:
        raise ConfigurationError("prune has nothing to drop; give --older-than, --session or --case")
    days = options.older_than
    lines = file.prune(
        options.path,
        before=None if days is None else days_before(datetime.now(timezone.utc), days),
        sessions=options.session,
        case=options.case,
        dry_run=options.dry_run,
    )
    print_lines(lines or [f"{options.path}: nothing to drop"])


HISTORY = Command(
    help="search results over time for changes, in the order of the commits",
    example="perfsuite history show --branch main --case all_reduce",
    arguments=_arguments,
    run=_run,
    found=_FOUND,
)
