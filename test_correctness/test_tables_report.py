"""A report as a whole: cases without a row, styles that fit what was measured, tables that are well formed."""

import dataclasses
import random
from unicodedata import east_asian_width

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import ConfigurationError
from perfsuite.record.result import Work
from perfsuite.reports.document import Grid
from perfsuite.reports.tables.case import from_result
from perfsuite.reports.tables.grids import escape, markdown
from perfsuite.reports.tables.published import published_of
from perfsuite.reports.tables.report import STYLES, fitting_styles, report
from test_correctness.helpers.report_runs import (
    MEMORY,
    gpt,
    kernel,
    latte,
    llama,
    opensora,
    pipeline,
    rows,
    run,
    section,
    style,
)


def test_skipped_failed_and_oom_rows_are_there_with_the_reason():
    case = "test_perf/test_it.py::test_latte[s4000-ws{}-latte-l]".format
    text = style(
        "latte",
        run(
            latte(1, 0.5),
            latte(2, 0.5, oom="OOM at 47.1 GiB of 48.0 GiB"),
            missing={case(4): "skipped: 4 ranks on a host with 2 devices", case(8): "failed: loss is | nan"},
        ),
    )
    told = [row for row in rows(text, "DDP: latte-l") if not row["nodes x ranks"].startswith("published")]
    why = ["", "OOM at 47.1 GiB of 48.0 GiB", "skipped: 4 ranks on a host with 2 devices", r"failed: loss is \| nan"]
    assert [row["nodes x ranks"] for row in told] == ["1 x 1 s4000", "2 s4000", "1 x 4 s4000", "1 x 8 s4000"]
    assert [row["not measured because"] for row in told] == why
    assert [(row["local batch"], row["global batch"]) for row in told] == [("1", each) for each in "1248"]
    for row in told[1:]:
        assert set(list(row.values())[5:-1]) == {""}, "nothing is made up"


def test_a_fixed_global_batch_is_spread_over_the_ranks_of_a_skipped_case():
    skipped = "test_perf/test_it.py::test_strong[a100-ws4-gpt2-xl]"
    results = [gpt("test_strong", ranks, 1 / ranks, global_batch_size=32) for ranks in (1, 2)]
    told = rows(style("methods", run(*results, missing={skipped: "skipped: why"})), "Strong scaling: gpt2-xl")
    (row,) = [row for row in told if row["nodes x ranks"] == "1 x 4 a100"]
    assert ("8", "32", "") == (row["local batch"], row["global batch"], row["speed-up"])


def test_cases_without_a_sibling_are_listed_at_the_end_by_reason():
    gone = {f"t.py::test_gone[cpu-ws2-latte-{name}]": "skipped: no | bf16" for name in "fedcba"}
    others = {f"t.py::test_{name}[cpu-ws2]": "skipped: no DeepSpeed" for name in ("llama2", "overlap")}
    failed = {"t.py::test_bad[cpu-ws2]": "failed: bad luck"}
    text = style("latte", run(latte(1, 0.5), missing={**gone, **others, **failed}))
    assert section(text, "Not measured") == [
        "",
        "- failed: bad luck: `t.py::test_bad[cpu-ws2]`",
        r"- skipped: no \| bf16: `t.py::test_gone[cpu-ws2-latte-a]`, `t.py::test_gone[cpu-ws2-latte-b]`, "
        "`t.py::test_gone[cpu-ws2-latte-c]`, `t.py::test_gone[cpu-ws2-latte-d]` and 2 more",
    ]


def test_a_smoke_run_measured_nothing():
    smoke = dataclasses.replace(latte(1, 0.5), outcome="smoke")
    assert from_result(smoke).values == {}
    with pytest.raises(ConfigurationError, match="nothing was measured"):
        style("latte", run(smoke))


def test_styles_follow_from_what_was_measured():
    runs = [run(latte(1, 1.0), opensora(1, 1.0))]
    assert ["opensora", "latte"] == [each.name for each in fitting_styles(runs)]
    of_no_table = kernel("mine", "step", 2, {}, Work(), latency_us=5.0)
    assert [(), ()] == [fitting_styles([run()]), fitting_styles([run(of_no_table)])]


def test_a_style_without_a_table_names_what_there_is_and_what_fits():
    fits = "choose --style=latte, or run pytest test_perf -k llama2"
    with pytest.raises(ConfigurationError, match=rf"^style flagperf .* journal.jsonl \(latte-l\); {fits}$"):
        style("flagperf", run(latte(1, 1.0)))
    with pytest.raises(ConfigurationError, match=r"^empty\.jsonl: nothing was measured, .* pytest test_perf -k latte$"):
        style("latte", run(name="empty.jsonl"))


def test_simulated_devices_are_stamped_and_compared_with_nothing_published():
    text = style("latte", run(dataclasses.replace(latte(8, 1.0, platform="rtx4090"), simulated=True)))
    assert "; the devices are simulated: no time here is a measurement" in text
    assert "the same run" not in text
    assert "not comparable with the row above: the devices here are simulated" in text


def test_the_same_case_of_two_runs_on_one_machine_counts_once_as_in_the_last():
    text = style("latte", run(latte(1, 1.0), name="old.jsonl"), run(latte(1, 0.5), name="new.jsonl"))
    assert ["2"] == [row["iter/s"] for row in rows(text, "DDP: latte-l") if row["nodes x ranks"] == "1 x 1 s4000"]


def test_a_case_that_a_later_run_skipped_stays_measured():
    case = "test_perf/test_it.py::test_latte[s4000-ws2-latte-l]"
    first = run(latte(1, 1.0), latte(2, 1.0), name="first.jsonl")
    later = run(latte(1, 0.5), missing={case: "skipped: no time"}, name="later.jsonl")
    text = style("latte", first, later)
    assert "no time" not in text
    assert ["2", "1"] == [row["iter/s"] for row in rows(text, "DDP: latte-l")[:2]]


def test_published_tables_that_a_style_names_exist_and_titles_of_columns_differ():
    for spec in (spec for each in STYLES.values() for spec in each.tables):
        assert {line.table for line in published_of(spec.published)} == set(spec.published), spec.title
        titles = [column.title for column in spec.columns]
        assert len(set(titles)) == len(titles), spec.title


CASES = (
    *(opensora(ranks, 1.0) for ranks in (1, 2)),
    *(latte(ranks, 1.0, builds=("memory",), records=MEMORY) for ranks in (1, 8)),
    latte(16, 1.0, oom="OOM at 1.0 GiB of 2.0 GiB"),
    *(llama(ranks, 1.0) for ranks in (2, 8)),
    *(gpt("test_weak", ranks, 1.0, micro_batch_size=2, builds=("exposed",)) for ranks in (1, 2, 4)),
    gpt("test_fsdp", 2, 1.0, strategy="fsdp", builds=("memory",), records=MEMORY),
    gpt("test_zero", 2, 1.0, strategy="zero_redundancy"),
    pipeline("1F1B", 8, 0.3),
    latte(8, 1.0, platform="cpu", model="latte-tiny", shared=True),
)


@settings(deadline=None, max_examples=12)  # a tenth of a second each
@given(chosen=st.sets(st.sampled_from(range(len(CASES)))), seed=st.integers(0, 1000))
def test_any_subset_of_results_gives_well_formed_tables_that_do_not_depend_on_their_order(chosen, seed):
    results = [CASES[index] for index in sorted(chosen)]
    shuffled = list(results)
    random.Random(seed).shuffle(shuffled)
    meaning = {"platform": "s4000", "fingerprint": "s4000-test"}
    runs, again = [run(*results, **meaning)], [run(*shuffled, **meaning)]
    styles = fitting_styles(runs)
    if not styles:
        assert not [result for result in results if result.outcome == "measured"]
        return
    text = report(runs, styles)
    assert text == report(again, styles)
    _require_well_formed(text)


def _shown(line):
    """Columns of a terminal: a Chinese character takes two."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in line)


def _bars(line):
    return [_shown(line[:at]) for at, letter in enumerate(line) if letter == "|" and line[at - 1] != "\\"]


def _require_well_formed(text):
    lines = text.splitlines()
    assert text.endswith("\n")
    assert not any(line != line.rstrip() for line in lines)
    for above, line, below in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if not line.startswith("|"):
            continue
        if not above.startswith("|"):
            assert above == "", "a table has an empty line above"
            assert set(below) <= set("|-: "), "the second line is the rule"
        else:
            assert _shown(line) == _shown(above), "columns are aligned"
            assert _bars(line) == _bars(above)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)


@given(st.lists(st.tuples(TEXT, TEXT), max_size=4))
def test_any_text_in_a_cell_stays_in_its_cell(rows):
    grid = Grid(title="T", columns=("a", "b"), rows=tuple(rows))
    lines = markdown(grid)
    body = [line for line in lines if line.startswith("|")][2:]
    assert len(body) == len(rows)
    for line, row in zip(body, rows, strict=True):
        cells = [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")]
        assert cells == [escape(cell).replace("\\|", "\0").strip() for cell in row]


def test_a_report_names_no_folder_of_whoever_made_it():
    missing = {"t.py::test_x[cpu-ws2]": "failed: cannot open /home/me/data/x.bin"}
    made = run(gpt("test_weak", 2, 0.5), name="/home/me/.perfsuite/journal-1.jsonl", missing=missing)
    text = report([made], [STYLES["methods"]])
    assert "- measured: .../journal-1.jsonl, " in text
    assert "failed: cannot open .../x.bin" in text
    assert "/home" not in text
