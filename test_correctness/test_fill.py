"""``perfsuite report --fill``: values in the empty cells of a report's own Markdown, and every other byte as it was."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base.errors import ConfigurationError
from perfsuite.published.lookup import shipped
from perfsuite.published.recipes import find
from perfsuite.record.result import Metric
from perfsuite.record.run import NOT_QUIET, Projected, Revision, RunEnd
from perfsuite.reports.fill import filled
from test_correctness.helpers.command_line import printed, refused
from test_correctness.helpers.report_runs import MEMORY, run, trained
from test_correctness.test_tables_command import journal as written

GIB = 2**30
TABLES = {f"{report.report}/{table.id}": table for report in shipped() for table in report.tables}
LLAMA, LATTE = "002-llama2_7b-fp16-1x8", "001-latte-l-b2-w16-2x8"
LOSS = (("final_loss", 3.5), ("whole_device_bytes", 40 * GIB))


def table_of(name, *, without=(), outer=True):
    """A published table as Markdown; cells of the columns ``without`` are empty."""
    table = TABLES[name]
    rows = [[column.title for column in table.printed_columns], ["---"] * len(table.printed_columns)]
    for row in table.rows:
        cells = [(column, table.cell(row, column)) for column in table.printed_columns]
        rows.append(["" if cell is None or column.name in without else cell.text for column, cell in cells])
    lines = (" | ".join(cells) for cells in rows)
    return "".join(f"| {line} |\n" if outer else f"{line}\n" for line in lines)


def ran(name, time_s=2.0, platform="s4000", case="", **changes):
    """The result of a published run."""
    recipe = find(name)
    node = case or recipe.case(platform)
    told = {"hosts": recipe.nodes, "records": (*MEMORY, *LOSS), **recipe.parameters, **changes}
    result = trained(node.rpartition("::")[2], recipe.world_size, time_s, platform=platform, **told)
    return dataclasses.replace(result, case=node)


def cells(text, line):
    """Cells of the row that holds ``line``."""
    (row,) = (row for row in text.splitlines() if line in row and not row.startswith("[^"))
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def untouched(text):
    """The text without what --fill wrote."""
    text = re.sub(r"\r?\n(\[\^perfsuite-\d+\]: .*\r?\n)+\Z", "", text)
    return re.sub(r"[^|\n]*\[\^perfsuite-\d+\][^|\r\n]*", "", text)


def blank(text):
    """The text without the insides of cells that are empty."""
    return re.sub(r"(?<=\|) *(?=[|\r\n])", "", text)


def fill(text, *results, **meaning):
    recording = run(*results, revision=Revision(commit="0123456789abcdef"), **meaning)
    return filled(text, "report.md", [recording])


# -- what is written ---------------------------------------------------------------------------------------------


def test_empty_cells_get_values_and_a_footnote_and_nothing_else_changes():
    before = f"# Our report\n\n{table_of('002/performance')}\ntext below"
    result = ran(LLAMA)
    told = fill(before, result)
    assert (2, {}, ("002/performance",)) == (told.cells, told.left, told.tables)
    values = {metric.name: metric.value for metric in result.metrics}
    _, _, tokens, loss, mem, mfu = cells(told.text, "1x8")
    assert tokens == f"{values['tokens_per_s_per_device']:.0f} [^perfsuite-1]"
    assert ("44.2/48.0", "3.20") == (loss, mem)
    palm = values["mfu_percent"] * values["palm_tflops_per_device"] / values["tflops_per_device"]
    assert mfu.endswith("% [^perfsuite-1]")
    assert float(mfu.partition("%")[0]) == pytest.approx(palm, rel=1e-3)
    assert told.text.endswith(
        "\ntext below\n\n[^perfsuite-1]: perfsuite, measured: journal `journal.jsonl`, case "
        f"`{find(LLAMA).case('s4000')}`, commit 0123456789ab; the row's run, as far as is stated\n"
    )
    assert blank(untouched(told.text)).rstrip("\n") == blank(before)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "below", "\n"])
def test_line_ends_pipes_and_marks_stay(outer, end, last):
    text = f"\ufeff{table_of('003/results', without=('latency', 'memory'), outer=outer)}{last}".replace("\n", end)
    told = fill(text, ran("003-2D_2x4x1_16_1536x16", 0.5, "v100"))
    assert told.cells == 2
    assert cells(told.text, "2D_2x4x1")[2:4] == ["500 (ms) [^perfsuite-1]", "40960 (MiB) [^perfsuite-1]"]
    assert blank(untouched(told.text)).removesuffix(end) == blank(text).removesuffix(end)
    assert told.text.count("\n") - told.text.count("\r\n") == (0 if end == "\r\n" else told.text.count("\n"))


@pytest.mark.extended
@given(st.lists(st.integers(0, 30), min_size=6, max_size=6))
def test_room_in_cells_is_kept_or_grows_by_the_text_alone(room):
    head, rule, row = table_of("002/performance").splitlines()
    wide = "|".join(cell + " " * more for cell, more in zip(row.strip("|").split("|"), room, strict=True))
    text = f"{head}\n{rule}\n|{wide}|\n"
    line = fill(text, ran(LLAMA)).text.splitlines()[2]
    before, after = text.splitlines()[2].strip("|").split("|"), line.strip("|").split("|")
    assert all(new == old for old, new in zip(before, after, strict=True) if old.strip())
    assert all(len(new) >= len(old) for old, new in zip(before, after, strict=True))


def test_a_column_gets_what_its_title_says():
    """In report 002 memory and loss stand in each other's column, in 000 an aggregate per card."""
    told = fill(table_of("002/performance", without=("loss", "mem")), ran(LLAMA))
    assert cells(told.text, "1x8")[3:5] == ["3.5 [^perfsuite-1]", "40 GiB [^perfsuite-1]"]
    told = fill(table_of("000/overview", without=("images_per_s",)), ran("000-opensora-1x8", 2.0))
    assert cells(told.text, "8卡")[2] == "0.5 images/s/GPU [^perfsuite-1]"


@pytest.mark.parametrize(
    ("name", "platform", "row"),
    [
        (LATTE, "rtx4090", ["2 x 8 4090", "14.5 GiB [^perfsuite-1]", "2", "32"]),
        ("001-latte-l-b4-w16-2x8", "rtx6000ada", ["2 x 8 a6000ada", "14.5 GiB [^perfsuite-1]", "4", "64"]),
    ],
)
def test_memory_names_its_unit_and_a_row_is_found_by_its_settings(name, platform, row):
    filled = fill(table_of("001/latte-l"), ran(name, platform=platform))
    assert cells(filled.text, "14.5")[:4] == row


def test_a_speed_up_is_filled_over_the_ranks_of_the_report_alone():
    text = table_of("001/latte-l", without=("speedup",))
    one, eight = (ran(f"001-latte-l-b1-w16-1x{ranks}", 0.5, "rtx4090") for ranks in (1, 8))
    sixteen = ran("001-latte-l-b1-w16-2x8", 0.5, "rtx4090")
    assert cells(fill(text, one, eight).text, "1 x 8 4090")[7] == "8 [^perfsuite-2]"
    told = fill(text, eight, sixteen)
    assert cells(told.text, "1 x 8 4090")[7] == ""
    assert told.left["speedup: counted over 8 ranks, and the report counts over 1"] == 2


# -- where values come from --------------------------------------------------------------------------------------


def projection(name=LLAMA, platform="s4000"):
    recipe = find(name)
    return Projected(
        kind="projected",
        case=recipe.case(platform),
        platform=platform,
        world_size=recipe.world_size,
        workload="m:TrainStep",
        parameters=recipe.parameters,
        metrics=(Metric(name="tokens_per_s_per_device", value=900.0, unit="tokens/s", better="higher"),),
        step_time_s=2.0,
        low_s=1.5,
        high_s=2.5,
    )


def test_what_is_projected_or_simulated_says_so():
    one = projection()
    told = fill(table_of("002/performance"), platform="s4000", projections={one.case: one})
    assert cells(told.text, "1x8")[2] == "900 [^perfsuite-1]"
    assert "[^perfsuite-1]: perfsuite, projected; step 1.5 s to 2.5 s in the 80 % band: journal" in told.text
    assert told.left == {"mfu: not projected": 1}
    told = fill(table_of("002/performance"), dataclasses.replace(ran(LLAMA), simulated=True))
    assert "[^perfsuite-1]: perfsuite, simulated, not measured on a device: journal" in told.text


def test_what_was_measured_goes_before_what_is_projected_and_the_last_file_before_others():
    one, text = projection(), table_of("002/performance")
    projected = run(platform="s4000", projections={one.case: one}, name="projected.jsonl")
    files = [run(ran(LLAMA, 1.0), name="a.jsonl"), run(ran(LLAMA, 4.0), name="b.jsonl"), projected]
    told = filled(text, "report.md", files)
    assert "journal `b.jsonl`" in told.text
    assert "perfsuite, measured" in told.text


def test_another_platform_fills_nothing_and_another_setting_is_told():
    told = fill(table_of("002/performance"), ran(LLAMA, platform="h200"))
    assert (0, table_of("002/performance")) == (told.cells, told.text)
    assert told.left == {f"{name}: of h200 alone, and the row is of s4000": 1 for name in ("tokens per s", "mfu")}
    told = fill(table_of("002/performance"), ran(LLAMA, micro_batch_size=1))
    assert "differs from the row: " in told.text
    assert "micro_batch_size 3, not 1" in told.text


def test_a_run_that_is_little_to_trust_says_so_in_the_footnote():
    end = RunEnd(at="", took_s=1.0, exit_status=0, warnings=(f"{NOT_QUIET}others took 57 %", "another warning"))
    told = fill(table_of("002/performance"), ran(LLAMA), end=end).text
    assert told.endswith("as far as is stated; the machine is not quiet: others took 57 %\n")


def test_what_ran_out_of_memory_is_not_filled_from_a_projection():
    one, oom = projection(), ran(LLAMA, oom="OOM at 47.9 GiB of 48 GiB")
    files = [run(oom), run(platform="s4000", projections={one.case: one}, name="projected.jsonl")]
    assert filled(table_of("002/performance"), "r.md", files).left["mfu: OOM at 47.9 GiB of 48 GiB"] == 1


def test_text_of_others_stays_in_its_footnote():
    result = ran(LLAMA, case="a\n| b/" + find(LLAMA).case("s4000").partition("/")[2])
    result = dataclasses.replace(result, parameters={**result.parameters, "data": "x](y)\n\n# z"})
    recording = run(result, name="j\n`k", revision=Revision(commit="0\n# 1"))
    told = filled(table_of("002/performance"), "report.md", [recording]).text
    assert told.count("\n") == table_of("002/performance").count("\n") + 2
    assert "x]\\(y)" in told
    assert "\n#" not in told


def test_why_a_cell_stays_empty_is_told():
    case = find(LLAMA).case("s4000")
    told = fill(table_of("002/performance"), ran("000-opensora-1x1"), missing={case: "skipped: 4 devices"})
    assert told.left == {"tokens per s: not measured": 1, "mfu: not measured": 1}
    oom = fill(table_of("002/performance"), ran(LLAMA, oom="OOM at 47.9 GiB of 48 GiB"))
    assert oom.left == {"tokens per s: OOM at 47.9 GiB of 48 GiB": 1, "mfu: OOM at 47.9 GiB of 48 GiB": 1}


@pytest.mark.parametrize("odd", [" " * 200_000, "-" * 200_000, "| " * 50_000, "[^perfsuite-" + "9" * 5_000 + "]"])
def test_odd_lines_take_no_time_and_stay(odd):
    """No pattern goes over a line more than a few times: with quadratic ones this would take hours."""
    text = table_of("002/performance")
    head = text.partition("\n")[0]
    for odd_text in (f"a | b\n{odd}\n{text}", f"{head}\n{odd}|-\n\n{text}", f"{text}{odd}|{odd}\n"):
        told = fill(odd_text, ran(LLAMA))
        assert (2, odd_text.count(odd)) == (told.cells, told.text.count(odd))


# -- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path):
    """The journal of a measured llama2-7b."""
    return written(tmp_path / "j.jsonl", ran(LLAMA))


def test_in_place_or_elsewhere_and_a_second_time_nothing(tmp_path, journal, capsys):
    file, other = tmp_path / "r.md", tmp_path / "o.md"
    file.write_text(table_of("002/performance"))
    said = printed(capsys, "report", journal, "--fill", file, "--output", other)
    assert said == f"{other}: 2 cells of 002/performance filled\n"
    assert file.read_text() == table_of("002/performance")
    printed(capsys, "report", journal, "--fill", file)
    assert file.read_bytes() == other.read_bytes()
    stamp = file.stat().st_mtime_ns, file.stat().st_ino
    said = printed(capsys, "report", journal, "--fill", file)
    assert said == f"{file}: 002/performance: no cell is empty, nothing was written\n"
    assert stamp == (file.stat().st_mtime_ns, file.stat().st_ino)


def test_footnotes_go_on_from_those_that_are_there(tmp_path, journal, capsys):
    file = tmp_path / "r.md"
    file.write_text(table_of("002/performance") + "\n[^perfsuite-3]: of an earlier fill\n")
    printed(capsys, "report", journal, "--fill", file)
    assert re.findall(r"\[\^perfsuite-(\d+)\]:", file.read_text()) == ["3", "4"]


A800 = """\
| 配置                |  fix_hp           | token/p/s | loss | mem       | MFU       |
| ------------------- | ---------------- | ------ | ------- | --------- | --------- |
| A800单机8卡（1x8）  |  /                |  |  |  |  |
| A800单机8卡（1x8）  |  MPE=2048 LBS=3  |  |  |  |  |
"""
"""As other vendors' pages in FlagPerf have the table of report 002."""
NO_TABLE = "has no Markdown table of a published report; titles and settings must be as printed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (A800, "has no Markdown table of a published report; the table of line 1 has the columns of 002/performance"),
        (A800.replace("| mem ", "| acc | mem "), NO_TABLE),
        (f"```\n{table_of('002/performance')}```\n", NO_TABLE),
        ("no table at all\n", NO_TABLE),
        ("", NO_TABLE),
        (
            table_of("003/results", without=("latency",)),
            "no cell of 003/results was filled, nothing was written: ",
        ),
    ],
)
def test_a_file_that_is_not_the_reports_is_one_line_and_stays(text, message, tmp_path, journal, capsys):
    file = tmp_path / "r.md"
    file.write_text(text)
    stamp = file.stat().st_mtime_ns, file.stat().st_ino
    for more in ([], ["--output", tmp_path / "o.md"]):
        said = refused(capsys, "report", journal, "--fill", file, *more)
        assert f"perfsuite: error: {file}: {message}" in said or f"perfsuite: error: {file} {message}" in said
    assert (text, stamp) == (file.read_text(), (file.stat().st_mtime_ns, file.stat().st_ino))
    assert not (tmp_path / "o.md").exists()


def test_a_file_that_cannot_be_read_or_written_is_one_line(tmp_path, journal, capsys):
    file, fill = tmp_path / "r.md", ("report", journal, "--fill")
    assert "cannot be read: No such file" in refused(capsys, *fill, file)
    file.write_bytes(table_of("002/performance").encode("utf-16"))
    assert "r.md: byte 0 is not UTF-8; save it as UTF-8" in refused(capsys, *fill, file)
    file.write_text(table_of("002/performance"))
    assert "--output: " in refused(capsys, *fill, file, "--output", tmp_path / "no" / "o.md")
    assert "--style has no effect with --fill; leave it out" in refused(capsys, *fill, file, "--style", "flagperf")


@pytest.mark.skipif("PERFSUITE_SEEDS" not in os.environ, reason="PERFSUITE_SEEDS does not name the five reports")
@pytest.mark.parametrize("report", shipped(), ids=lambda report: report.report)
def test_the_reports_themselves_keep_every_byte(report):
    text = (Path(os.environ["PERFSUITE_SEEDS"]) / report.file).read_bytes().decode()
    result = ran(LATTE, platform="rtx4090") if report.report == "001" else ran(LLAMA)
    if report.report == "004":
        with pytest.raises(ConfigurationError, match="tables drawn in code are not filled"):
            fill(text, result)
        return
    told = fill(text, result)
    assert told.cells == {"000": 0, "001": 3, "002": 2, "003": 0}[report.report]
    assert blank(untouched(told.text)) == blank(text)
