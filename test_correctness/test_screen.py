"""One screen: what stands on it, that it is never larger, and that text of others does nothing but be read."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfsuite.base.errors import RanksFailed
from perfsuite.cli.main import main
from perfsuite.expectations.judge import Expected
from perfsuite.expectations.rows import Expectation
from perfsuite.metrics.disturbance import disturbance
from perfsuite.plugin.summary import error_commands
from perfsuite.record.describe import verdict_counts
from perfsuite.record.journal import read_journal
from perfsuite.record.result import Metric, Peak, Work
from perfsuite.record.run import GateRecord, Revision, RunEnd
from perfsuite.record.verdict import Verdict
from perfsuite.reports.families import family_lines, share_of_peak, tiles
from perfsuite.reports.layout import lay_out
from perfsuite.reports.material import material_of
from perfsuite.reports.notable import notable
from perfsuite.reports.page.page import render
from perfsuite.reports.questions import Answer, answer_lines, answers
from perfsuite.reports.screen import MOST_LINES, screen
from perfsuite.reports.stored import Recording
from perfsuite.reports.summary import LIMIT_BYTES, markdown_summary
from perfsuite.reports.terminal import metric_tables
from test_correctness.helpers.runs import (
    PEAK,
    all_reduce,
    journal_of,
    large_run,
    on_devices,
    product,
    record,
    remeasured,
    result,
    verdict,
)
from test_correctness.helpers.scripted_driver import repository

HOSTILE = (
    "\x1b[31mred",
    "\u202egnp.exe",
    "half \ud800 of one",
    "\n::error::forged",
    "<script>alert(1)</script>",
    "](javascript:alert(1)) | `code` ]]>",
    "x" * 10_000,
)


def texts(run, width=100, **options):
    return [line for line, _ in screen(run, notable(run), width=width, **options)]


def test_the_screen_of_a_run():
    end = RunEnd(
        at="",
        took_s=350.0,
        exit_status=0,
        warnings=("the machine is not quiet: 101 of 216 cases disturbed, e.g. t.py::x: rank 0 got 81% of its core",),
    )
    run = record(
        *(product("t.py::test_a", 0.694), product("t.py::test_b", 0.174, "fp32")),
        *(all_reduce(1 << 20, ranks, ranks * 5e-4) for ranks in (2, 4)),
        skips={"t.py::s1": "no DeepSpeed", "t.py::s2": "no DeepSpeed"},
        end=end,
        gate=GateRecord(gate=False, verdicts=(Verdict(case="t.py::test_a", name="no-baseline"),)),
    )
    assert texts(run, links=[("next", "perfsuite show j.jsonl --show=tables")]) == [
        "4 measured, 2 skipped; 5 min 50 s",
        "gate        compared 0 of 1 case with a baseline; --perf-update=append stores one",
        "trust       NOT QUIET: 101 of 216 cases disturbed (~)",
        "question                   best          of peak",
        "compute bf16               694 GFLOPS    90 % measured",
        "compute fp32               174 GFLOPS    23 % measured",
        "all_reduce, 4 ranks, 1MiB  786 MB/s bus",
        " . skipped 2: 2 x no DeepSpeed",
        "next        perfsuite show j.jsonl --show=tables",
    ]
    assert texts(run, quiet=True) == ["4 measured, 2 skipped; 5 min 50 s", " . skipped 2: 2 x no DeepSpeed"]


@pytest.mark.parametrize("width", [40, 79, 119])
def test_a_long_sign_keeps_trust_within_the_width(width):
    sign = "tasks waited for a core in 24 % of the 10 s before the first case of this run on this machine"
    end = RunEnd(at="", took_s=1.0, exit_status=0, warnings=(f"the machine is not quiet: {sign}", "bbr " * 30))
    (line,) = [text for text in texts(record(product("a", 0.5), end=end), width) if text.startswith("trust")]
    assert len(line) <= width
    assert line.startswith("trust       NOT QUIET: ")
    assert line.endswith("; + 1 more")


def test_trust_is_one_line_unless_a_gate_left_something_undecided():
    warnings = ("the machine is not quiet: other programs took 9% of the core time; 1 of 1 case disturbed", "bbr " * 30)
    end = RunEnd(at="", took_s=1.0, exit_status=0, warnings=warnings)
    line = "trust       NOT QUIET: 1 of 1 case disturbed (~); + 2 more"
    assert [line] == [text for text in texts(record(product("a", 0.5), end=end), 79) if "disturbed" in text]
    for name, lines in (("pass", 1), ("inconclusive", 4)):
        gate = GateRecord(gate=True, verdicts=(Verdict(case="a", name=name),))
        shown = texts(record(product("a", 0.5), end=end, gate=gate), 79)
        after = shown.index("question      best        of peak")
        assert lines == after - next(number for number, text in enumerate(shown) if text.startswith("trust"))
    full = texts(record(product("a", 0.5), end=end), 79, full=True)
    assert "            other programs took 9% of the core time" in full


def test_a_run_that_was_stopped_does_not_say_that_the_machine_was_quiet():
    """A run that SIGTERM ends has no time to look at the machine; the screen said that it saw no other programs."""
    end = RunEnd(at="", took_s=1.0, exit_status=2)
    stopped = record(product("a", 0.5), end=end, interrupted={"b": "SIGTERM"})
    assert "trust       unknown whether the machine was quiet" in texts(stopped)
    ended = record(product("a", 0.5), end=dataclasses.replace(end, exit_status=0))
    assert "trust       no sign of other programs" in texts(ended)


def disturbed(plain):
    """The same result, measured while another program had the rank's core."""
    ranks = tuple(dataclasses.replace(rank, cpu_share=0.4) for rank in plain.measurement.ranks)
    return remeasured(plain, ranks=ranks, involuntary_switches=(1,) * len(plain.measurement.times_s), aligned=True)


def test_a_disturbed_figure_is_marked_and_has_no_share_nor_a_tile():
    quiet, busy = product("t.py::quiet", 0.5), disturbed(product("t.py::busy", 0.6))
    (row,) = answers([busy])
    assert ("~600 GFLOPS", "") == (row.best, row.share)
    (row,) = answers([quiet, busy])
    assert ("500 GFLOPS", "65 % measured") == (row.best, row.share), "an undisturbed figure is preferred"
    assert ([], ["500 GFLOPS"]) == (list(tiles([busy])), [figure for _, figure, _ in tiles([quiet])])
    table = " ".join(metric_tables([busy]))
    assert "~500 ms" in table
    assert "~ disturbed, without a share of the peak: 1 case, as rank 0 got 40% of its core" in table


def test_a_rank_that_may_sleep_is_disturbed_by_switches_a_kernel_by_its_share_alone():
    busy = disturbed(product("t.py::busy", 0.6))
    stolen = remeasured(busy, involuntary_switches=())
    assert ["rank 0 got 40% of its core"] * 2 == [disturbance(busy), disturbance(stolen)]
    sleeper = dataclasses.replace(busy, metrics=())
    sleeps = dataclasses.replace(sleeper, measurement=stolen.measurement)
    assert ("rank 0 got 40% of its core", "") == (disturbance(sleeper), disturbance(sleeps))


def test_a_doubtful_efficiency_is_left_out_and_counted():
    def step(ranks, median_s):
        work = Work(samples=8.0 * ranks)
        return result(f"t.py::test_weak[cpu-ws{ranks}]", median_s, world_size=ranks, work=work, parameters={})

    def line(*steps):
        return next(text for text in texts(record(*steps)) if text.startswith("scaling"))

    assert "scaling     weak 1/2 ranks: 100 50 % (ranks share devices)" == line(step(1, 0.1), step(2, 0.2))
    assert "1 of 1 left out: speed-up 20 on 2 times the ranks is above linear" in line(step(1, 0.1), step(2, 0.01))
    assert "1 of 1 left out: test_weak[cpu-ws1] was disturbed" in line(disturbed(step(1, 0.1)), step(2, 0.2))


def h100(case, tflops, ranks_s=(0.5,)):
    peak = Peak(value=989.0, unit="TFLOPS", source="data sheet", kind="published")
    metric = Metric(name="tflops", value=tflops * len(ranks_s), unit="TFLOPS", better="higher", peak=peak)
    one = dataclasses.replace(
        product(case, tflops),
        platform="h100",
        workload="perfsuite.workloads.matmul:Matmul",
        parameters={"m": 8192, "k": 8192, "n": 8192, "dtype": "bf16"},
        defaults={"result_dtype": ""},
        metrics=(metric,),
    )
    return on_devices(one, ranks_s, aligned=True, times_s=(max(ranks_s),) * 3)


def test_expected_ranges_and_slow_devices_are_named():
    healthy = (0.5, 0.501, 0.499, 0.5, 0.5, 0.5, 0.5)
    (row,) = answers([h100("t.py::all", 600.0, (*healthy, 0.6))])
    assert ("600 TFLOPS", "bad") == (row.best, row.mark), "per device, not the sum"
    assert "8 devices, others -0.2 to +0.2 %, SLOW cuda:7 -16.7 %" in row.note
    run = record(h100("t.py::all", 600.0, (*healthy, 0.6)))
    for text in (markdown_summary(run, ()), render(material_of([Recording(run=run)])).partition('id="s-device"')[0]):
        assert "SLOW cuda:7 -16.7 %" in text, "the page and the summary name it too"
        assert " % of the published peak, 8 devices" in text
    entry = expected_entry(300.0)
    (row,) = answers([h100("t.py::one", 300.0)], [entry])
    assert ("500-700 TFLOPS LOW", "bad") == (row.expected, row.mark)
    assert "expected" not in " ".join(texts(record(h100("t.py::one", 300.0)), expected=[])), "no column without a row"
    assert "LOW" in " ".join(texts(record(h100("t.py::one", 300.0)), expected=[entry], quiet=True))


def test_the_verdict_says_whether_results_are_as_expected():
    low = expected_entry(300.0)
    run = record(h100("t.py::one", 300.0))
    line = "verdict     LOW: 1 of 1 judged result below expectation; --perf-expect makes it fail"
    assert [line] == [text for text in texts(run, expected=[low], quiet=True) if text.startswith("verdict")]
    good = dataclasses.replace(low, verdict="pass")
    assert "verdict     as expected: 1 judged result" in texts(run, expected=[good])
    end = RunEnd(at="", took_s=1.0, exit_status=1, verdict="FAIL: 1 of 1 judged result below expectation")
    shown = texts(dataclasses.replace(run, end=end), expected=[low])
    assert "verdict     FAIL: 1 of 1 judged result below expectation" in shown
    assert not any(text.startswith("question") for text in shown), "its table is above the screen"


def test_a_narrow_screen_counts_the_questions_that_it_leaves_out():
    families = ("compute",) * 5 + ("memory",) * 4
    rows = [
        Answer(family=family, question=f"{family} {number}", best="1.05 GB/s bus", share="90 % measured")
        for number, family in enumerate(families)
    ]
    lines = [line for line, _ in answer_lines(rows, 30)]
    assert ["question", "  best           of peak", "compute 0", "  1.05 GB/s bus  90 % measured"] == lines[:4]
    assert (19, "+ 1 more question") == (len(lines), lines[-1])


def test_a_collective_is_shown_on_ranks_that_fit_the_cores():
    def on_cores(ranks):
        return dataclasses.replace(all_reduce(1 << 20, ranks, ranks * 1e-3), environment={"cores": {"which": "0-1"}})

    shown = answers([on_cores(2), on_cores(8)])
    assert [("all_reduce, 2 ranks, 1MiB", "")] == [(row.question, row.note) for row in shown]
    (alone,) = answers([on_cores(8)])
    assert ("all_reduce, 8 ranks, 1MiB", "oversubscribed") == (alone.question, alone.note)


def expected_entry(tflops):
    metric = Metric(name="tflops", value=tflops, unit="TFLOPS", better="higher")
    row = Expectation(
        platform="h100",
        workload="Matmul",
        parameters={},
        metric="tflops",
        unit="TFLOPS",
        kind="measured",
        low=500.0,
        high=700.0,
        source="s",
        place="p",
        date="2026",
    )
    return Expected(case="t.py::one", question="q", size="", metric=metric, verdict="below", reason="low", rows=(row,))


def test_a_dtype_has_one_row_with_its_best_product():
    def square(side, tflops):
        sides = dict.fromkeys(("m", "k", "n"), side)
        return dataclasses.replace(product(f"t.py::test_{side}", tflops), parameters=sides)

    flat = dataclasses.replace(product("t.py::test_flat", 0.1), parameters={"m": 1, "k": 512, "n": 512})
    compute = [line for line in texts(record(square(1024, 0.694), square(512, 0.25), flat)) if "GFLOPS" in line]
    assert compute == ["compute bf16  694 GFLOPS  90 % measured"]


@pytest.mark.parametrize("width", [79, 119, 199])
@pytest.mark.parametrize("count", [1, 300])
def test_no_run_takes_more_than_a_screen_nor_a_line_more_than_its_width(count, width):
    lines = texts(large_run(count), width, links=[("next", "perfsuite show " + "deep/" * 60 + "j.jsonl")])
    assert len(lines) <= MOST_LINES
    too_wide = [line for line in lines if len(line) > width]
    assert all(len(line.split()) == 1 for line in too_wide), "but an id or a path alone on its line"
    assert lines[0].startswith(f"{count + 45} measured, {count} failed, {count} skipped")


def test_what_is_left_out_is_counted_by_kind():
    (more,) = (line for line in texts(large_run(300)) if line.startswith(" . and "))
    assert more == " . and 606 more: 296 failed, 300 regressed, 9 above-peak, 1 slowest"


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_others_is_only_read(text):
    case = f"t.py::test[{text}]"
    run = record(
        product(case, 0.5),
        failures={f"{case}2": text},
        skips={f"{case}3": text},
        revision=Revision(commit="c" * 40, branch=text, subject=text),
        gate=GateRecord(gate=True, fail_on=("regressed",), verdicts=(verdict(case),), suite_line=text),
        end=RunEnd(at="", took_s=1.0, exit_status=1, warnings=(text,)),
    )
    places = dict.fromkeys(run.failures, (f"{text[:50]}.py", 3))
    told = [*texts(run), *error_commands(run, places, root=Path("/r"))]
    markdown = markdown_summary(run, notable(run))
    for line in (*told, *markdown.splitlines()):
        line.encode("utf-8")
        assert line.isprintable(), "no control character, no mark of direction"
        assert not line.startswith("::error::forged")
    prose = re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", markdown)
    assert not re.search(r"(?<!\\)<script|(?<!\\)\]\(javascript", prose)
    assert len(markdown) < LIMIT_BYTES


def test_what_exceeds_a_measured_peak_is_no_share():
    (row,) = answers([product("t.py::a", 227.6)])
    assert (row.best, row.share) == ("228 TFLOPS", "(peak exceeded)")
    gone = Metric(name="mfu_percent", value=None, unit="percent", better="higher", note="above the measured peak")
    assert share_of_peak(dataclasses.replace(gone, peak=PEAK)) == "(peak exceeded)"


@pytest.mark.parametrize("width", [30, 60, 90])
def test_a_wide_table_is_told_in_blocks_that_have_every_cell(width):
    headings = ["case", *(f"column{number}\nunit" for number in range(8))]
    rows = [[f"test_case[{row}]", *(f"{row}.{number}" for number in range(8))] for row in range(3)]
    lines = lay_out(headings, rows, width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    assert all(words.count(cell) == 1 for row in rows for cell in row[1:])
    assert all(words.count(row[0]) == words.count("case") for row in rows)


@pytest.fixture
def journal(tmp_path):
    gate = GateRecord(gate=True, fail_on=("regressed",), verdicts=(verdict("t.py::test_product[cpu-64]"),))
    cases = product("t.py::test_product[cpu-64]", 0.5), all_reduce(1 << 20, 2, 1e-3)
    return journal_of(tmp_path / "journal.jsonl", *cases, skips={"t.py::test_gone": "no device"}, gate=gate)


def test_a_journal_shows_later_what_the_terminal_showed(journal, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["show", str(journal)]) == 0
    said = capsys.readouterr().out
    assert "2 measured, 1 skipped" in said
    assert "gated 1 of 1 case: 1 regressed" in said
    assert " ! 8.1 % slower [6.2, 10], 1 s -> 1.081 s   t.py::test_product[cpu-64]" in said
    assert main(["show", str(journal), "--show", "tables"]) == 0
    assert "test_product[cpu-64]" in capsys.readouterr().out.partition("perfsuite: cpu")[0]


def test_one_case_is_shown_with_all_that_is_known(journal, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["show", str(journal), "--case", "product"]) == 0
    said = capsys.readouterr().out
    assert 'case="t.py::test_product[cpu-64]"' in said
    assert ": median 500 ms, 500 ms to 550 ms tflops" in " ".join(said.split())
    assert "tflops  0.5 TFLOPS  65 % of measured 772 GFLOPS" in said
    assert "REGRESSED +8.1 %" in said
    assert "all_reduce" not in said
    assert max(map(len, said.splitlines())) <= 80
    assert main(["show", str(journal), "--case", "nothing"]) == 4
    assert "no case of journal.jsonl has 'nothing' in its id" in capsys.readouterr().err


def test_a_baseline_file_is_shown_too(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["show", "baselines/examples/cpu-example.json"]) == 0
    said = capsys.readouterr().out
    assert "compute bf16               99.7 GFLOPS" in said
    assert "all_reduce, 2 ranks, 1MiB  1.1 GB/s bus" in said


TESTS = """
@dtypes("fp32", "bf16")
def test_product(perf, dtype):
    perf(Product(side=64, dtype=dtype))

def test_plain(benchmark):
    benchmark.pedantic(lambda: None, rounds=3)
"""


def test_a_run_shows_one_screen_and_the_table_of_plain_benchmarks_alone(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, TESTS)
    done = repo.run("--perf-show=summary", "--perf-summary=new/summary.md")
    done.assert_outcomes(passed=3)
    said = done.stdout.str()
    screen_lines = said.partition("= perfsuite: cpu")[2].partition("- benchmark")[0].splitlines()[1:]
    assert screen_lines[0].startswith("2 measured")
    assert max(map(len, screen_lines)) <= 119
    assert not any(line.startswith("case ") for line in screen_lines)
    table = said.partition("- benchmark")[2]
    assert "test_plain" in table
    assert "test_product" not in table
    summary = pytester.path.joinpath("new/summary.md").read_text()
    assert summary.startswith("**perfsuite**: 2 cases measured, none compared")
    (journal,) = pytester.path.joinpath(".perfsuite").glob("journal-*.jsonl")
    run = read_journal(journal)
    assert (run.end.exit_status, run.arguments[-1], len(run.gate.verdicts)) == (0, "--perf-summary=new/summary.md", 2)
    quiet = repo.run("-q", "-k", "product").stdout.str().partition("= perfsuite: cpu")[2]
    assert "2 measured" in quiet
    assert "trust" not in quiet
    assert "test_product" in repo.run("--perf-show=cases", "-k", "fp32").stdout.str().partition("- benchmark")[2]


@pytest.mark.parametrize("option", ["--perf-summary=file/s.md", "--perf-report=file/r.md", "--perf-html=file/p.html"])
def test_a_target_that_cannot_be_written_is_told_before_anything_is_measured(pytester, monkeypatch, option):
    repo = repository(pytester, monkeypatch, TESTS)
    pytester.path.joinpath("file").write_text("")
    name, _, path = option.partition("=")
    repo.refuses(option, says=f"{name}: *{path} cannot be written: *")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "given", "coloured"),
    [(80, "env -u PY_COLORS -u NO_COLOR TERM=xterm", True), (200, "env -u PY_COLORS NO_COLOR=1", False)],
)
def test_a_real_terminal_gets_no_line_that_it_must_wrap(pytester, columns, given, coloured):
    pytester.makeconftest('pytest_plugins = ["perfsuite.plugin"]')
    pytester.makepyfile(test_it=ON_A_RANK)
    command = f"stty cols {columns} rows 50; {given} {sys.executable} -m pytest -p no:cacheprovider"
    shown = subprocess.run(
        ["script", "-qec", command, "/dev/null"], capture_output=True, text=True, timeout=300, check=False
    ).stdout
    assert "1 measured" in shown
    below = shown.partition("perfsuite: cpu")[2].partition("1 measured")[2].splitlines()[1:-1]
    assert below
    assert all(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= columns for line in below)
    assert ("\x1b[32m" in shown) is coloured


ON_A_RANK = """
def step(rank):
    return lambda: sum(range(1000))

def test_mine(perf):
    perf(step)
"""


def test_a_figure_without_a_peak_hides_none_that_has_one():
    def stream(case, value, peak):
        metric = Metric(name="gb_per_s", value=value, unit="GB/s", better="higher", peak=peak)
        work = Work(bytes_moved=1.0, memory_path="device")
        return result(case, workload="m:MemoryTriad", work=work, metrics=(metric,))

    memory = Peak(value=50.0, unit="GB/s", source="measured here", kind="measured")
    (row,) = answers([stream("t.py::cached", 900.0, None), stream("t.py::streamed", 40.0, memory)])
    assert (row.question, row.best, row.share) == ("memory triad", "40 GB/s", "80 % measured")


def test_parts_beyond_any_screen_are_counted_and_not_written():
    speed = Metric(name="tokens_per_s_per_device", value=8.0, unit="tokens/s", better="higher")
    steps = [result(f"t.py::test_step[cpu-{n}]", work=Work(tokens=8.0), metrics=(speed,)) for n in range(100)]
    (line,) = family_lines(steps)
    assert (len(line[1]), line[2]) == (60, 40)
    (told,) = (line for line in texts(record(*steps)) if "more" in line and "tokens/s" in line)
    assert told.endswith(f"+ {100 - ' '.join(texts(record(*steps))).count('tokens/s')} more")


def test_what_a_rank_raises_is_text_to_the_terminal_too(pytester, monkeypatch):
    def fails(job):
        raise RanksFailed("rank 0 raised ValueError: \x1b[31mred \u202e and\nmore")

    done = repository(pytester, monkeypatch, TESTS, script=fails).run("-k", "product", "--color=no")
    told = done.stdout.str()
    assert "ValueError: \\x1b[31mred \\u202e and\nmore" in told
    assert not re.search("[\x1b\u202e]", told)


def test_how_many_runs_a_comparison_needs_is_said_while_cases_learn():
    verdicts = {name: Verdict(case=name, name="learning") for name in ("a", "b")}
    told = "compared 0 of 2 cases with a baseline, 2 learning"
    needs = "; a comparison needs 5 usable stored runs"
    assert verdict_counts(verdicts, False) == f"{told}; --perf-update=append stores one{needs}"
    assert verdict_counts(verdicts, False, stores=True) == f"{told}{needs}"


def test_a_gate_that_has_too_few_stored_runs_says_how_many_there_are():
    learning = Verdict(case="a", name="learning", stored_runs=3)
    verdicts = {"a": learning, "b": Verdict(case="b", name="no-baseline")}
    told = "not gated yet: 3 of 5 runs stored (1 learning, 1 no-baseline)"
    assert verdict_counts(verdicts, True) == f"{told}; --perf-update=append stores one"
    assert verdict_counts(verdicts, True, stores=True) == told
    passing = Verdict(case="c", name="pass", stored_runs=5)
    assert verdict_counts({**verdicts, "c": passing}, True).startswith("gated 1 of 3 cases: ")


COLOURS = (
    ((), {}, False),
    ((), {"FORCE_COLOR": "1"}, True),
    ((), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ((), {"NO_COLOR": "1", "PY_COLORS": "1"}, True),
    ((), {"FORCE_COLOR": "1", "PY_COLORS": "0"}, False),
    (("--color=no",), {"FORCE_COLOR": "1"}, False),
    (("--color=yes",), {"NO_COLOR": "1"}, True),
)
OF_PYTEST = f"""
import os
from _pytest.config import create_terminal_writer, get_config
for option, variables, coloured in {COLOURS!r}:
    for name in ("PY_COLORS", "NO_COLOR", "FORCE_COLOR"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    config = get_config()
    config.parse(list(option))
    assert create_terminal_writer(config).hasmarkup == coloured, (option, variables)
"""
"""Fails where pytest itself does not write colours into a pipe as COLOURS say."""


def test_show_has_the_colours_of_pytest(tmp_path, monkeypatch, capsys):
    subprocess.run([sys.executable, "-c", OF_PYTEST], stdout=subprocess.PIPE, timeout=60, check=True, cwd="/")
    end = RunEnd(at="", took_s=1.0, exit_status=1)
    path = journal_of(tmp_path / "j.jsonl", failures={"t.py::test_a": "boom \x1b[2J"}, end=end)
    for option, variables, coloured in COLOURS:
        for name in ("PY_COLORS", "NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(["show", str(path), *option]) == 0
        out = capsys.readouterr().out
        assert ("\x1b[31m ! failed: boom \\x1b[2J   t.py::test_a\x1b[0m\n" in out) == coloured, (option, variables)
        assert coloured or "\x1b" not in out


def test_too_few_stored_runs_are_said_everywhere():
    """The page and the summary said that there was no baseline, where the screen said that 3 of 5 runs are stored."""
    verdicts = (Verdict(case="a", name="learning", stored_runs=3),)
    run = record(product("a", 0.5), gate=GateRecord(gate=True, verdicts=verdicts))
    assert any("3 of 5 runs stored" in text for text in texts(run))
    for text in (markdown_summary(run, ()), render(material_of([Recording(run=run)]))):
        assert "3 of 5 runs are stored" in text
        assert "there is no baseline" not in text


PLACES = {
    "all skipped": ("@pytest.mark.skip('not here')\ndef test_a(perf):\n    perf(Product())\n", "1 skipped"),
    "all failed": ("def test_a(perf):\n    raise ValueError\n", "1 failed"),
    "failed after its measurement": (
        "def test_a(perf):\n    perf(Product())\n    assert False\n",
        "1 measured, 1 failed (1 of them measured)",
    ),
    "xfail": (
        "@pytest.mark.xfail\ndef test_a(perf):\n    raise ValueError\n\ndef test_b(perf):\n    perf(Product())\n",
        "1 measured, 1 xfailed",
    ),
    "ended between cases": (
        "def test_a(perf):\n    perf(Product())\n\ndef test_b(perf):\n    pytest.exit('enough')\n",
        "1 measured",
    ),
    "lost": ("def test_a(perf):\n    perf(Product())\n", "1 measured"),
}
ENDS = {"ended between cases": "the run was interrupted", "lost": "the run did not end"}


@pytest.mark.parametrize("kind", PLACES)
def test_screen_show_page_and_summary_count_the_same(pytester, monkeypatch, capsys, kind):
    tests, counts = PLACES[kind]
    found = repository(pytester, monkeypatch, f"import pytest\n\n{tests}").run("--perf-html=run.html")
    journals = sorted((pytester.path / ".perfsuite").glob("journal-*.jsonl"))
    said = {"html": (pytester.path / "run.html").read_text(encoding="utf-8"), "screen": found.stdout.str()}
    if kind == "all skipped":  # a run without a result has no screen, and no journal as one without a measurement
        del said["screen"]
        assert journals == []
    elif kind != "all failed":
        (path,) = journals
        if kind == "lost":
            del said["screen"]
            lines = [line for line in path.read_text().splitlines(keepends=True) if not line.startswith('{"end"')]
            path.write_text("".join(lines))
            said["html"] = render(material_of([Recording(run=read_journal(path))]))
        run = read_journal(path)
        said["md"] = markdown_summary(run, notable(run))
        assert main(["show"]) == 0
        said["show"] = capsys.readouterr().out
    for where, text in said.items():
        assert counts in text, where
        assert ENDS.get(kind, "") in text.replace("The run", "the run"), where
    title = said["html"].partition("<title>")[2].partition("</title>")[0]
    assert title.startswith("FAIL: 1 failed") == ("failed" in kind)
    assert "PASS" not in title
