"""``perfsuite history``: performance over time, in the order of the commits."""

from __future__ import annotations

import argparse
import dataclasses
from datetime import datetime, timezone
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural
from perfsuite.baselines.runs import days_before
from perfsuite.cli.main import EXIT_FOUND, EXIT_OK, Command, exit_codes, print_lines
from perfsuite.history import file
from perfsuite.history.describe import list_lines, show_lines
from perfsuite.history.findings import Findings, searched
from perfsuite.history.git import Repository
from perfsuite.history.session import session_of
from perfsuite.metrics import read_run
from perfsuite.record.run import Revision
from perfsuite.reports.over_time import OverTime
from perfsuite.statistics.change_points import LEAST_VALUES as LEAST_SESSIONS

DEFAULT = Path("perf-history.jsonl")
_FOUND = "show --fail-on found such a change"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    listing = what.add_parser("list", help="one line per session: time, commit, branch, cases")
    show = what.add_parser("show", help="what changed between which commits, and what small changes add up to")
    add = what.add_parser("add", help="add the sessions of journals")
    merge = what.add_parser("merge", help="make FILE the union of itself and the others")
    prune = what.add_parser("prune", help="drop old or named sessions, or named cases")
    for parser_of in (listing, show, prune):
        parser_of.add_argument(
            "path", nargs="?", type=Path, default=DEFAULT, metavar="FILE", help=f"history; default {DEFAULT}"
        )
    show.add_argument(
        "--branch", default="", metavar="NAME", help="branch whose commits order the sessions; default: HEAD's"
    )
    show.add_argument("--case", default="", metavar="TEXT", help="only cases whose id contains this text")
    show.add_argument(
        "--since", default="", metavar="REV", help="only changes after this revision, and what came of it"
    )
    show.add_argument(
        "--host",
        default="",
        metavar="NAME",
        help="search sessions of this host only, or of all (default: most sessions)",
    )
    show.add_argument("--html", type=Path, metavar="FILE", help="write the same as a page with charts, too")
    show.add_argument(
        "--fail-on",
        metavar="CHANGE",
        help="exit with 1 for a change of this kind: slower, any, or slower by at least a share such as 3%%",
    )
    add.add_argument("journals", nargs="+", type=Path, metavar="JOURNAL", help="journal of a run")
    add.add_argument("--history", dest="path", type=Path, default=DEFAULT, metavar="FILE", help=f"default {DEFAULT}")
    add.add_argument("--commit", default="", metavar="REV", help="what the journals measured, where they do not say")
    add.add_argument("--branch", default="", metavar="NAME", help="the branch that it was on")
    merge.add_argument("path", type=Path, metavar="FILE", help="history that is written")
    merge.add_argument("others", nargs="+", type=Path, metavar="OTHER", help="histories of the same hardware")
    prune.add_argument("--older-than", type=float, metavar="DAYS", help="drop sessions older than so many days")
    prune.add_argument("--session", action="append", default=[], metavar="ID", help="drop this session; repeatable")
    prune.add_argument("--case", default="", metavar="PATTERN", help="drop cases whose id matches this shell pattern")
    prune.add_argument("--dry-run", action="store_true", help="only say what would change")
    for parser_of in (show, add):
        parser_of.add_argument(
            "--repository", type=Path, default=Path(), metavar="DIR", help="git repository; default: here"
        )
    for parser_of in (listing, show, add, merge, prune):
        parser_of.epilog = exit_codes(_FOUND if parser_of is show else "")


def run(options: argparse.Namespace) -> int:
    """Carry out ``perfsuite history``."""
    actions = {"list": _list, "show": _show, "add": _add, "merge": _merge, "prune": _prune}
    return actions[options.what](options)


def _list(options: argparse.Namespace) -> int:
    print_lines(list_lines(file.read(options.path)))
    return EXIT_OK


def _show(options: argparse.Namespace) -> int:
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
        return EXIT_OK
    if _has(findings, least, options.fail_on == "any"):
        return EXIT_FOUND
    _require_searched(findings, options.path)
    return EXIT_OK


def _require_searched(findings: Findings, path: Path) -> None:
    """Raise ConfigurationError where no case has the sessions that a change takes: then nothing was looked for."""
    table = findings.table
    most = max((len(table.rows_of(table.cases.index(case))) for case in findings.cases), default=0)
    if most < LEAST_SESSIONS:
        raise ConfigurationError(
            f"--fail-on: nothing was searched in {path}: a change takes {LEAST_SESSIONS} sessions of a case on the "
            f"branch with equal settings, and none has more than {most}; add sessions, or leave --fail-on out"
        )
    if findings.nothing_since:
        raise ConfigurationError(
            f"--fail-on: nothing was searched in {path}: no session has a commit after {findings.since}; add one, or "
            "leave --since out"
        )


def _least_of(written: str | None) -> float | None:
    """The share from which on a slower case fails; None where none does."""
    if written is None:
        return None
    if written in ("slower", "any"):
        return 0.0
    try:
        share = float(written.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not (written.endswith("%") and 0 < share < 10):
        raise ConfigurationError(f"--fail-on: {written!r} is no change; write slower, any, or a share such as 3%")
    return share


def _has(findings: Findings, least: float, faster_too: bool) -> bool:
    ratios = [change.ratio.value - 1 for change in findings.changes]
    ratios += [change.ratio.value - 1 for change in findings.accumulated]
    return any(ratio > 0 and ratio >= least for ratio in ratios) or (faster_too and bool(ratios))


def _add(options: argparse.Namespace) -> int:
    repository = Repository(root=options.repository)
    asked = repository.revision(options.commit) if options.commit else Revision()
    for path in options.journals:
        run = read_run(path)
        session = session_of(
            (result for result in run.results.values() if result.session in ("", run.session)),
            session=run.session,
            time=run.started_at,
            platform=run.platform,
            fingerprint=run.fingerprint,
            revision=_revision(run.revision, asked, options.branch),
        )
        if not session.cases:
            raise ConfigurationError(f"{path}: nothing was measured, so there is nothing to add")
        done = "added" if file.append(options.path, session) else "is there already"
        print(f"{options.path}: session {session.session} with {plural(len(session.cases), 'case')} {done}")
    return EXIT_OK


def _revision(recorded: Revision, asked: Revision, branch: str) -> Revision:
    """What a journal says of its code, as far as it does, else what the command line says."""
    known = recorded if recorded.commit else asked
    return dataclasses.replace(known, branch=branch or known.branch)


def _merge(options: argparse.Namespace) -> int:
    history, new = file.merge(options.path, options.others)
    print(f"{options.path}: {len(history.sessions)} sessions, {new} new")
    return EXIT_OK


def _prune(options: argparse.Namespace) -> int:
    if options.older_than is None and not options.session and not options.case:
        raise ConfigurationError("prune drops what is named: give --older-than, --session or --case")
    now = datetime.now(timezone.utc)
    drop = file.Drop(
        before=days_before(now, options.older_than) if options.older_than is not None else None,
        sessions=frozenset(options.session),
        case=options.case,
    )
    said = file.prune(options.path, drop, dry_run=options.dry_run)
    print("\n".join(said) or f"{options.path}: nothing to drop")
    return EXIT_OK


HISTORY = Command(
    help="show performance over time: sessions in the order of the commits, what changed where, what adds up",
    arguments=arguments,
    run=run,
    found=_FOUND,
)
