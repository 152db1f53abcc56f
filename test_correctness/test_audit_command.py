"""``perfsuite audit``: the shipped tables, and a user's own as CSV, Markdown or JSON."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings

from perfsuite.audit.audit import audit
from perfsuite.audit.read import parse_facts, parse_roles, read_tables
from perfsuite.published.records import directory
from test_correctness.helpers.audit_tables import scaling_tables
from test_correctness.helpers.command_line import as_json, printed, refused, run


@pytest.fixture
def audited(tmp_path, capsys):
    """Write a table into a file and audit it with these roles: the exit code, and what is printed."""

    def found(text, *roles, name="table.csv"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        code, out, err = run(capsys, "audit", tmp_path / name, "--roles", *roles)
        return code, out + err

    return found


CSV = 'gpus,batch,"step (ms)",samples/s,remark\n1,2,406.16,4.92,\n8,16,417.952,38.28,fine\n'
ROLES_OF_CSV = ["gpus=devices", "batch=global_batch_size", "step (ms)=latency", "samples/s=throughput"]


def test_csv_of_a_user(audited):
    code, out = audited(CSV.replace("38.28", "83.28"), *ROLES_OF_CSV)
    assert 1 == code
    assert "rules apply" in out
    assert "row 2 (8): samples/s is printed 83.28, the row gives 38.28" in out


MARKDOWN = """
# Notes

| GPUs | time (ms) | speed-up |
|-----:|:---------:|----------|
| 1 | 100.0 | 1.00x |
| 4 | 50.0 | **3.90x** |

GPUs | memory
-- | --
1 | 78
8 | 9.8
"""


def test_markdown_tables_of_a_user(audited):
    roles = ["GPUs=devices", "time (ms)=latency", "speed-up=speedup", "memory=memory:GB"]
    code, out = audited(MARKDOWN, *roles, "--fact", "local_batch_size=4", name="notes.md")
    assert 1 == code
    for said in ("notes.md:4", "notes.md:9", "memory-exactly-inverse"):
        assert said in out
    code, out = audited(MARKDOWN, *roles, "--json", name="notes.md")
    found = {each["rule"]: each for one in json.loads(out) for t in one["tables"] for each in t["findings"]}
    assert (1, ["row 2 (4)"]) == (code, found["speedup-ratio"]["rows"])
    assert "contradiction" == found["speedup-ratio"]["severity"]


@pytest.mark.parametrize(("gain", "code"), [("3.8", 0), ("4.9", 1)])
def test_json_of_a_user(tmp_path, capsys, gain, code):
    roles = (("n", "devices"), ("rate", "throughput"), ("gain", "speedup"))
    rows = [{"line": 1, "cells": ["1", "100", "1.0"]}, {"line": 2, "cells": [["4", 4], "380", gain]}]
    table = {"id": "scaling", "title": "scaling", "rows": rows}
    table["columns"] = [{"name": name, "role": role} for name, role in roles]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"schema": 1, "report": "mine", "file": "", "title": "my runs", "tables": [table]}))
    out = printed(capsys, "audit", path, code=code)
    assert ("gain is printed 4.9, the row gives 3.8" in out) == bool(code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{csv}"], "the columns have no roles"),
        (["{csv}", "--roles", "gpus"], "is not COLUMN=ROLE[:UNIT]"),
        (["{csv}", "--roles", "gpus=cards"], "'cards' is not a role; choose from case, "),
        (["{csv}", "--roles", "time=latency:hours"], "'hours' is not a unit of latency; choose from us, ms, s, min, h"),
        (["{csv}", "--roles", "gpus=devices:ms"], "'ms' is not a unit of devices; leave the unit out"),
        (["{csv}", "--roles", "cards=devices"], "no column 'cards'; its columns are batch, gpus"),
        (["{csv}", "--roles", "gpus=devices"], "no rule applies"),
        (["{csv}", "--roles", *ROLES_OF_CSV, "--fact", "peak_tflops=much"], "peak_tflops is a number"),
        (["{csv}", "--roles", *ROLES_OF_CSV, "--fact", "peak_tflops"], "is not ROLE=VALUE"),
        (["{none}", "--roles", "gpus=devices"], "cannot be read"),
        (["{empty}", "--roles", "gpus=devices"], "no table found"),
        (["{drawn}", "--roles", "gpus=devices"], "no table found; give a CSV file, or Markdown or HTML tables"),
        (["{long}", "--roles", "a=devices"], "3 cells for 2 columns"),
        (["{twins}", "--roles", "a=devices"], "two columns have one name"),
        (["{json}", "--roles", "a=devices"], "has its own roles"),
        (["{json}"], "not a file of published tables"),
        (["--roles", "a=devices"], "--roles and --fact need a file"),
        (["--fact", "tp=8"], "--roles and --fact need a file"),
        (["--labels", "--list-rules"], "not allowed with"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_4(tmp_path, capsys, arguments, message):
    texts = {"csv": CSV, "empty": "nothing here\n", "long": "a,b\n1,2,3\n", "twins": "a,a\n1,2\n", "json": "{}"}
    texts["drawn"] = "+----+\n|gpus|\n+====+\n| 8  |\n+----+\n"
    files, endings = {"none": tmp_path / "none.csv"}, {"json": "json", "empty": "md", "drawn": "md"}
    for name, content in texts.items():
        files[name] = tmp_path / f"{name}.{endings.get(name, 'csv')}"
        files[name].write_text(content, encoding="utf-8")
    code, out, err = run(capsys, "audit", *(each.format(**files) for each in arguments))
    assert (4, "", True) == (code, out, message in err), err


TOKENS = "gpus,length,tokens/s/gpu,mfu\n8,2048,4792,39.79\n64,2048,4800,{mfu}\n"


@pytest.mark.parametrize(("mfu", "expected"), [("39.86", 0), ("49.86", 1)])
def test_a_language_model_without_a_step_time_is_judged(audited, mfu, expected):
    roles = ["gpus=devices", "length=sequence_length", "tokens/s/gpu=tokens_per_s_per_device", "mfu=mfu:%", "--fact"]
    roles += ["model=mpt", "parameters=12.85:B", "peak_tflops=989.4"]
    code, out = audited(TOKENS.format(mfu=mfu), *roles)
    assert expected == code
    assert ("contradiction: tflops-tokens -> X" in out) == bool(expected)
    assert "with a column or --fact of tflops (achieved operations per second of one device), 4 more rules could" in out
    gains = json.loads(audited(TOKENS.format(mfu=mfu), *roles, "--json")[1])[0]["more_rules_with"]
    assert sorted(gains.values(), reverse=True) == list(gains.values())
    assert "latency" in gains
    assert not {"devices", "mfu"} & gains.keys()


def test_shipped_tables_exit_0_as_they_are_labelled(capsys):
    code, out, err = run(capsys, "audit")
    assert (0, "") == (code, err)
    for part in ("004/router [R, by outside knowledge]", "004/ddp [R]", "contradiction: flops-above-peak -> R"):
        assert part in out
    assert "LABEL" not in out
    tables = {table["table"]: table for report in as_json(capsys, "audit") for table in report["tables"]}
    assert ("X", "X") == (tables["004/fsdp"]["label"], tables["004/fsdp"]["derived_label"])
    assert "flops-above-peak" in tables["003/results"]["rules_applied"]


def test_a_wrong_label_is_found(tmp_path, capsys):
    plain = json.loads((directory() / "004.json").read_text(encoding="utf-8"))
    next(each for each in plain["tables"] if each["id"] == "ddp")["judgement"]["label"] = "M"
    path = tmp_path / "004.json"
    path.write_text(json.dumps(plain), encoding="utf-8")
    assert "LABEL 004/ddp: labelled M, the rules give R" in printed(capsys, "audit", path, code=1)


@pytest.mark.parametrize("listing", ["--labels", "--list-rules", "--list-roles"])
def test_listings(capsys, listing):
    out = printed(capsys, "audit", listing)
    expected = {"--labels": "| 004/ddp |", "--list-rules": "| flops-above-peak |", "--list-roles": "latency  "}
    assert expected[listing] in out
    if listing != "--list-roles":
        assert {line.count("|") for line in out.splitlines()} == {6}


@settings(max_examples=8, deadline=None)
@given(valid=scaling_tables())
def test_a_table_survives_the_way_through_a_file(tmp_path_factory, valid):
    path: Path = tmp_path_factory.mktemp("csv") / "t.csv"
    text_of = io.StringIO()
    writer = csv.writer(text_of)
    names = [column.name for column in valid.columns]
    writer.writerow(names)
    writer.writerows([[row.cells[name].text for name in names] for row in valid.rows])
    path.write_text(text_of.getvalue(), encoding="utf-8")
    (read,) = read_tables(path, {column.name: column for column in valid.columns}, valid.facts)
    assert [row.cells for row in valid.rows] == [row.cells for row in read.rows]
    assert [] == audit([read])


SWEEP = "size,gpus,time us,algbw,busbw\n8388608,8,91.10,92.08,161.14\n1073741824,8,8142.6,131.87,230.77\n"
OF_SWEEP = ("gpus=devices", "time us=communication_time:us", "--fact", "collective=all_reduce", "--roles")


@pytest.mark.parametrize(
    ("roles", "change", "expected"),
    [
        (["busbw=bandwidth:GB/s"], ("x", ""), (0, "nothing found")),
        (["busbw=busbw", "algbw=algbw", "size=message_size"], ("x", ""), (0, "nothing found")),
        (["busbw=bandwidth", "size=message_size"], ("230.77", "430.77"), (1, "size / time is 131.9 GB/s, busbw 230.8")),
        (["busbw=busbw", "algbw=algbw"], ("161.14", "141.14"), (1, "busbw / algbw is 1.533, that of all_reduce on 8")),
    ],
)
def test_a_sweep_of_message_sizes_is_checked_row_by_row(audited, roles, change, expected):
    code, out = audited(SWEEP.replace(*change), *OF_SWEEP, *roles)
    assert (expected[0], True) == (code, expected[1] in out)


PEAKS = "model,gpus,tflops,mfu,peak\nGPT-3 175B,512,390,47%,1979\n"


@pytest.mark.parametrize(
    ("facts", "is_found"),
    [
        (["device=H100"], True),
        (["device=NVIDIA H100 SXM5 80GB", "dtype=bf16"], True),
        (["device=H100", "dtype=fp8"], False),
        (["device=Unheard 100"], False),
        (["device=H100", "dense_peak_tflops=1979"], False),
    ],
)
def test_a_stated_peak_is_compared_with_the_dense_one_of_the_catalog(audited, facts, is_found):
    _, out = audited(PEAKS, "gpus=devices", "tflops=tflops", "mfu=mfu", "peak=stated_peak_tflops", "--fact", *facts)
    assert ("peak 1979 is 2.001 times the dense peak 989 (twice" in out) == is_found


def test_a_device_with_a_dtype_gives_the_peak_of_every_row(audited):
    facts = ["parameters=7:B", "sequence_length=2048", "devices=8"]
    table = "device,dtype,tflops\nA100,bf16,330\nH100,bf16,330\nMTT S4000,fp16,98\n"
    code, out = audited(table, "device=device", "dtype=dtype", "tflops=tflops", "--fact", *facts)
    assert code == 1
    assert ["1.058 times the peak of 312"] == [line.partition(", ")[2] for line in out.splitlines() if "times" in line]


def test_zeros_and_cells_without_a_number_are_mentioned(audited):
    table = "kernel,gpus,s/ep,tok/s\nsdpa,0,0,0\nvectorized,1,80.139,see below\nvectorized,,113.767,1e999\n"
    code, out = audited(table, "kernel=config", "gpus=devices", "s/ep=latency:s", "tok/s=tokens_per_s")
    assert code == 0
    for text in ("gpus is 0 in 1 of 3", "s/ep is 0", "gpus is blank in 1", "tok/s is blank or without a number in 2"):
        assert text in out


@pytest.mark.parametrize(
    ("header", "rows", "role", "expected"),
    [
        ("tok/s", ["406.5k", "3.04M"], "tokens_per_s", [406_500, 3_040_000]),
        ("loss", ["1_200", "1\u202f300", "\u22125", "<b>9</b>"], "loss", [1200, 1300, -5, 9]),
        ("step", ["705 ms", "1,367ms"], "latency", [0.705, 1.367]),
        ("step (msec)", ["705", "1367"], "latency", [0.705, 1.367]),
        ("step", ["12 \u00b5s", "13"], "latency", [12e-6, 13e-6]),
        ("bw (Gbps)", ["80", "160"], "bandwidth", [1e10, 2e10]),
        ("TFLOP/s/GPU (TFLOP/s/GPU)", ["636", "586"], "tflops", [636e12, 586e12]),
        ("mem", ["512M", "600 MiB", "1.5GB"], "memory", [512e6, 600 * 2**20, 1.5e9]),
        ("size", ["512 KB", "1 MB", "1GiB", "8B"], "message_size", [512e3, 1e6, 2**30, 8]),
        ("size (KB)", ["512", "1 MB"], "message_size", [512 * 2**10, 2**20]),
        (
            "size",
            ["512 KB", "1 MB", "4"],
            "message_size",
            "row 3 (run), size: '4' has no unit, but another cell is in KB",
        ),
        ("params", ["7B", "340m"], "parameters", [7e9, 340e6]),
        ("step (ms)", ["1.147 s/it", "5us/op"], "latency", [1.147, 5e-6]),
        ("step (ms)", ["\uff11\uff12.5", "\u0663\u066b5"], "latency", [0.0125, 0.0035]),
        ("loss", ["\u20135", "\u2011 .5", "_5_", "1\u2019147"], "loss", [-5, -0.5, 5, 1147]),
        ("step (ms)", ["5&nbsp;s", "6&#8239;ms"], "latency", [5, 0.006]),
        ("step", ["13", "12 ms"], "latency", "step: '13' has no unit, but another cell is in ms"),
        ("step", ["705 ms", "1.4 s"], "latency", [0.705, 1.4]),
        ("run", ["20 min", "2 h"], "training_time", [1200, 7200]),
        ("tok/s", ["10000-12000", "10 to 12"], "tokens_per_s", [11_000, 11]),
        ("tok/s", ["3500 \u00b1 20", "16.67 samples/s (8.3 of one)"], "tokens_per_s", [3519, 16.67]),
        ("tok/s (k)", ["131", "9 [1]"], "tokens_per_s", [131_000, 9000]),
        ("Ktokens/s", ["131", "2.5k"], "tokens_per_s", [131_000, 2500]),
        ("loss", ["2.5<sup>2</sup>", "[3.5](https://host/9)"], "loss", [2.5, 3.5]),
        ("gpus", ["2x8", "8x A100 80GB"], "devices", [16, 8]),
        ("mem", ["76/80 GB", "44.2/48.0"], "memory", [76e9, 44.2e9]),
        ("tok/s", ["9" * 5000], "tokens_per_s", "9 has 5000 characters; write one number"),
        ("mfu", ["62%", "0.45"], "mfu", "mfu: '0.45' has no percent sign, other rows have one"),
        ("mem (MB)", ["14005(-1331,8.7\u2193%)", "OOM (80)"], "memory", [14005e6, None]),
        ("mem", ["(2x) 20", "(80)"], "memory", [20e9, 80e9]),
        ("tok/s", ["8.07\u4e07", "600\u4e07 tokens/s"], "tokens_per_s", [80_700, 6_000_000]),
        ("time", ["1.5 \u5c0f\u65f6", "30\u5206\u949f"], "training_time", [5400, 1800]),
        ("step (\u6beb\u79d2)", ["105", "1.5 \u79d2/\u6b65"], "latency", [0.105, 1.5]),
        ("step", ["[ms]", "105", "7"], "latency", [None, 0.105, 0.007]),
        ("gpus", ["8 (2x4)", "16 GPUs"], "devices", [8, 16]),
        *(
            ("gpus", [text, "8"], "devices", f"row 1 (run), gpus: {text!r} can be read in more than one way")
            for text in ("1 node/8 GPUs", "2/16", "2 / 16")
        ),
        ("it/s", ["2.3it/s", "1.20s/it"], "iterations_per_s", "row 2 (run), it/s: '1.20s/it' is not a rate per second"),
        ("tok/min", ["600", "700"], "tokens_per_s", "row 1 (run), tok/min: '600' is not a rate per second; convert it"),
        (
            "rate",
            ["9 images per hour"],
            "throughput",
            "row 1 (run), rate: '9 images per hour' is not a rate per second",
        ),
        ("tok/s per device", ["9 tok/s/h100", "9 tok/s/host"], "tokens_per_s", [9, 9]),
        ("batch", ["4K", "8K"], "batch_size", "row 1 (run), batch: '4K' has a suffix that its column cannot have"),
        # 8K of LLAMA3-8B and `SeqLen (K)` of NeMo's performance pages; prime-rl's and others' `seq 16k`
        ("length", ["4K", "8k", "32,768", "1M tokens"], "sequence_length", [4096, 8192, 32768, 2**20]),
        ("SeqLen (K)", ["8", "1024"], "sequence_length", [8192, 2**20]),
        ("length", ["4.1K"], "sequence_length", "length: '4.1K' is not a whole number of tokens"),
        ("step (ms)", ["512 \u00b1 1.2%", "2 s \u00b1 1 %", "512 ms \u00b1 3 ms"], "latency", [0.518, 2.019, 0.5149]),
        ("step", ["512-600 ms", "512 \u00b1 3 ms", "1.2 s/it \u00b1 0.1"], "latency", [0.599, 0.5149, 1.299]),
        ("step", ["12.3 ms \u00b1 45 us"], "latency", "can be read in more than one way"),
        ("tok/s", ["2.5k \u00b1 20"], "tokens_per_s", "can be read in more than one way"),
        ("mfu", ["45.2% \u00b1 1.1%", "45.2 \u00b1 1.1%"], "mfu", [0.4629, 0.4629]),
        ("mem", ["512 / 600 MB", "512-600 MB", "40 / 80 GB"], "memory", [512e6, 600e6, 40e9]),
        # FlagPerf's READMEs print nodes x devices behind a name: aquila2_7b-flagscale-nvidia, yolov5-pytorch
        (
            "\u914d\u7f6e",
            [
                "A800\u5355\u673a8\u5361\uff081x8\uff09",
                "H100-55\u673a440\u5361\uff0855x8\uff09",
                "A100\u4e24\u673a8\u5361\uff082x8\uff09",
            ],
            "devices",
            [8, 440, 16],
        ),
        ("gpus", ["8 (2x8)"], "devices", "'8 (2x8)' can be read in more than one way"),
        ("gpus", ["2x8 A100", "2 nodes x 8", "4x2x8", "16 (2x8)"], "devices", [16, 16, 64, 16]),
        ("Active/Total", ["1B/8B"], "parameters", "'1B/8B' can be read in more than one way"),
        ("ms", ["13100.0/13240.9"], "latency", "'13100.0/13240.9' can be read in more than one way"),
        ("params", ["8x7B"], "parameters", "'8x7B' can be read in more than one way"),
        ("tok/s", ["OOM at 8", "timeout > 1h", "N/A for 8 GPUs", "3 (OOM at 4)"], "tokens_per_s", [None] * 3 + [3]),
        ("tok/s", ["1,671", "-1)"], "tokens_per_s", "row 2 (run), tok/s: '-1)' can be read in more than one way"),
        *(
            ("step", [text, "20.5"], "latency", f"row 1 (run), step: {text!r} has a suffix that its column cannot have")
            for text in ("95%", "2 it/s", "5 thousand")
        ),
        *(
            ("step", [text, "20.5"], "latency", f"row 1 (run), step: {text!r} can be read in more than one way")
            for text in (
                *("10,5", "2,5 s", "1.234,5", "1.234.567", "12 500", "1h20m", "1m 30s", "00:01:30", "1:30", "0x10"),
                *("1.2x10\u00b3", "16.67 * 2048 / 8 = 4267", "4550<br/>9600", "Llama 3 70B"),
            )
        ),
    ],
)
def test_units_and_suffixes_in_cells_are_read_or_refused(tmp_path, header, rows, role, expected):
    path = tmp_path / "foreign.md"
    path.write_text("\n".join([f"| case | {header} |", "|---|---|", *(f"| run | {row} |" for row in rows)]))
    roles = parse_roles([f"{header}={role}"])
    (table,) = read_tables(path, roles, {})
    if isinstance(expected, str):
        assert expected in "\n".join(table.unread)
        return
    assert () == table.unread
    read = [table.value(row, role) for row in table.rows]
    assert [value is None for value in expected] == [one is None for one in read]
    assert all(one.low <= value <= one.high for value, one in zip(expected, read, strict=True) if one)


CELLS = """
| run | gpus | batch | tok/s | ms |
|---|---|---|---|---|
| a | 8 | 32 | 1000 | 100 |
| b | 8 | 32 | OOM | - |
| c | 2/16 | 32 | 900 | 100 |
| d | 16 | 32 | 1,5 | 60 |
| e | 16 | 32 | ~ | TBD | 5 |
| f | 16 | 64 | N/A | 100 |
"""


def test_a_cell_that_cannot_be_read_costs_itself_and_a_setting_its_row(tmp_path, capsys):
    path = tmp_path / "cells.md"
    path.write_text(CELLS)
    roles = ["gpus=devices", "batch=global_batch_size", "tok/s=tokens_per_s", "ms=latency:ms"]
    code, out, _ = run(capsys, "audit", path, "--roles", *roles)
    unread = [line.partition("cannot be read: ")[2] for line in out.splitlines() if "cannot be read: " in line]
    why = "can be read in more than one way; write one number, with a decimal point and without other separators"
    extra = "row 5: ['e', '16', '32', '~', 'TBD', '5'] has 6 cells for 5 columns"
    assert [f"row 3 (c), gpus: '2/16' {why}; the row is left out", f"row 4 (d), tok/s: '1,5' {why}", extra] == unread
    assert (1, False) == (code, "contradiction" in out)
    assert "tok/s is blank or without a number in 2 of 3 rows (row 4 (d), row 6 (f))" in out
    assert "    out of memory: row 2 (b)\n" in out
    _, out, _ = run(capsys, "audit", path, "--json", "--roles", *roles)
    assert [unread] == [table["unread"] for one in json.loads(out) for table in one["tables"]]
    path.write_text("\n".join(line for line in CELLS.splitlines() if line[2:3] not in "cde"))
    assert 0 == run(capsys, "audit", path, "--roles", *roles)[0]
    path.write_text(path.read_text() + "".join(f"| x{at} | 8 | 32 | 1,5 | 100 |\n" for at in range(12)))
    code, out, _ = run(capsys, "audit", path, "--roles", *roles)
    assert (1, True) == (code, "cannot be read: 2 more cells (--json has all)" in out)


def test_a_fact_in_percent_is_a_share():
    """A share without a unit is a fraction of 1: 40% was 40."""
    units = [parse_facts([fact])["mfu"].unit for fact in ("mfu=40%", "mfu=0.4", "mfu=40:%")]
    assert ["%", "", "%"] == units


@pytest.mark.parametrize(("fact", "code"), [("4K", 0), ("4096", 0), ("4000", 1), ("about", 4), ("1,5", 4)])
def test_a_fact_is_read_as_a_cell(tmp_path, capsys, fact, code):
    path = tmp_path / "facts.md"
    path.write_text("| gpus | samples/s | tok/s |\n|---|---|---|\n| 8 | 1000.0 | 4096000 |\n")
    roles = ["gpus=devices", "samples/s=throughput", "tok/s=tokens_per_s"]
    found, _, err = run(capsys, "audit", path, "--roles", *roles, "--fact", f"sequence_length={fact}", "parameters=7B")
    assert (code, code == 4) == (found, "--fact" in err)


HTML = """
<!-- <table><tr><th>gpus</th></tr><tr><td>7</td></tr></table> -->
<table><thead>
<th>gpus</th><th>samples/s<br/>(k)</th>
<th>speed-up<sup>1</sup></th></thead>
<!-- <tr><td>7</td></tr> -->
<tr><td>1</td><td>0.100</td><td><b>1.0</b></td></tr>
<tr><td>8</td><td><a href="log/9">0.700</a></td><td>7.0&nbsp;x</td>
<tr><td>16</td><td>1.400</td><td>{last}</td></tr></table>
| framework | licence |
|---|---|
| any | MIT |
<table><tr><td>name</td></tr><tr><td>x</td></tr></table>
<table></table>
<table><tr><td>gpus</td><td colspan="2">samples/s (k)</td></tr><tr><td>1</td><td>2</td><td>3</td></tr></table>

    +------+-----------+
    | gpus | samples/s |
    +------+-----------+
    | 8    | 7         |
    +------+-----------+
"""


@pytest.mark.parametrize(("last", "code"), [("14.1", 0), ("19.1", 1)])
def test_html_tables_are_read_and_tables_without_a_role_are_named(audited, last, code):
    roles = ["gpus=devices", "samples/s (k)=throughput", "speed-up=speedup"]
    found, out = audited(HTML.format(last=last), *roles, name="README.md")
    assert (code, "row 3 (16): speed-up is printed 19.1" in out) == (found, bool(code))
    assert "README.md:3 [" in out
    assert "merged cells, or lines of +---+): README.md:10, README.md:13, README.md:15, README.md:17\n" in out
    assert "  1 table, " in out
    _, out = audited(HTML.format(last=last), *roles, "--json", name="README.md")
    names = [f"README.md:{line}" for line in (10, 13, 15, 17)]
    assert [names] == [one["not_checked"] for one in json.loads(out)]


@pytest.mark.parametrize("text", ["<table " * 20_000, "<!-- " * 20_000, "<table><tr>" + "<td" * 20_000 + "</table>"])
def test_tags_without_an_end_are_scanned_once(tmp_path, text):
    """Each of them was searched for its end up to the end of the file, for a minute."""
    path = tmp_path / "long.md"
    path.write_text(text + "\n\n| gpus | ms |\n|---|---|\n| 8 | <sup>1 |\n")
    assert ["long.md:3"] == [one.name for one in read_tables(path, parse_roles(["gpus=devices", "ms=latency"]), {})]


@pytest.mark.parametrize(
    ("heading", "gpus", "is_found"),
    [
        ("", ("A100", "A100"), True),
        ("", ("A100", "V100"), False),
        ("## fp32", ("A100", "A100"), False),
        ("# fp32\n## one device", ("A100", "A100"), False),
        ("## 2.1 Results on one device: table 3", ("A100", "A100"), True),
        ("## Scaling, one device (A100)", ("A100", "A100"), True),
        ("## one device\nThe following table shows the throughput:", ("A100", "A100"), True),
        ("## one device with ZeRO", ("A100", "A100"), False),
        ("## one device\nInference performance", ("A100", "A100"), False),
        ("## two devices", ("A100", "A100"), False),
        ("## results", ("A100", "A100"), False),  # "one" may state a setting
        ("# amp", ("A100", "A100"), False),  # the table is not below "one device"
    ],
)
def test_tables_of_other_devices_and_under_other_headings_are_other_runs(audited, heading, gpus, is_found):
    """DLPerf prints mixed precision and single precision under two headings, with the same batch on one device."""
    rows = (f"| {gpus[0]} | 1 | 64 | 800 |", f"| {gpus[1]} | 1 | 64 | 300 |")
    tables = [f"| gpu | n | batch | img/s |\n|-|-|-|-|\n{row}\n" for row in rows]
    roles = ["gpu=device", "n=devices", "batch=batch_size", "img/s=throughput", "--fact", "model=resnet"]
    text = f"# amp\n## one device\n{tables[0]}\n{heading}\n{tables[1]}"
    _, out = audited(text, *roles, name="two.md")
    assert is_found == ("same-run-disagrees" in out) == ("tables-differ" in out)
    assert (gpus[0] == gpus[1] and not is_found) == ("  not compared: 1 pair of rows with other throughputs" in out)
    _, out = audited(text, *roles, "--json", name="two.md")
    assert [int(gpus[0] == gpus[1] and not is_found)] == [one["not_compared"] for one in json.loads(out)]


@pytest.mark.parametrize(("length", "again", "code"), [("192", "59961", 0), ("192", "41527", 1), ("", "41527", 0)])
def test_tokens_of_one_run_are_compared_between_tables(tmp_path, capsys, length, again, code):
    """Transformer-XL of DeepLearningExamples: 59,961 tok/s in mixed precision, 41,527 in TF32."""
    path = tmp_path / "two.md"
    table = "## {}\n| n | batch | tok/s |\n|-|-|-|\n| 1 | 32 | {} |\n"
    path.write_text(table.format("Results", "59961") + table.format("Summary", again))
    facts = ["model=txl", *([f"sequence_length={length}"] if length else [])]
    for role in ("tokens_per_s", "tokens_per_s_per_device"):
        roles = ["n=devices", "batch=batch_size", f"tok/s={role}"]
        found, out, _ = run(capsys, "audit", path, "--roles", *roles, "--fact", *facts)
        assert (code, bool(code)) == (found, "same-run-disagrees" in out)


@pytest.mark.parametrize(
    ("rows", "missed"),
    [
        (["1,a,100,1.0,9", "8,a,700,7.0,9"], "mem"),
        (["1,a,100,1.0,9", "1,b,50,1.0,9"], "rate, gain, mem"),
        (["1,a,100,-,9"], "rate, gain, mem"),
        ([f"{2**n},a,{100 * 2**n},{2**n}.0,9" for n in range(30)], "mem"),
    ],
)
def test_columns_in_which_no_rule_notices_a_wrong_figure_are_named(audited, rows, missed):
    roles = ["gpus=devices", "model=model", "rate=throughput", "gain=speedup", "mem=memory"]
    _, out = audited("\n".join(["gpus,model,rate,gain,mem", *rows]), *roles)
    assert f"no rule notices a figure 3 times too large or too small in: {missed}\n" in out


def test_pipes_in_cells_and_semicolons_separate_as_meant(tmp_path):
    path = tmp_path / "pipes.md"
    path.write_text("| run | gpus |\n|---|---|\n| a \\| b | 8 |\n")
    (table,) = read_tables(path, parse_roles(["gpus=devices", "run=config"]), {})
    assert (table.rows[0].cells["run"].text, table.rows[0].cells["gpus"].text) == ("a | b", "8")
    path = tmp_path / "semicolons.csv"
    path.write_text("gpus;tok/s, all\n8;1000.5\n")
    (table,) = read_tables(path, parse_roles(["gpus=devices"]), {})
    assert table.rows[0].cells["gpus"].text == "8"


@pytest.mark.parametrize(("mfu", "code"), [("~120%", 1), ("> 104 %", 1), ("~95%", 0), ("<120%", 0), ("100-130%", 0)])
def test_an_estimated_share_above_one_is_impossible(audited, mfu, code):
    assert code == audited(f"gpus,mfu\n8,{mfu}\n16,41%\n", "gpus=devices", "mfu=mfu")[0]


def test_an_empty_setting_at_the_begin_of_a_row_is_that_of_the_row_above(tmp_path):
    path = tmp_path / "merged.md"
    path.write_text("| model | gpus | tok/s |\n|---|---|---|\n| 7b | 8 | 100 |\n|  | 16 | 190 |\n| 13b | 8 |  |\n")
    (table,) = read_tables(path, parse_roles(["model=model", "gpus=devices", "tok/s=tokens_per_s"]), {})
    assert ["7b", "7b", "13b"] == [table.text(row, "model") for row in table.rows]


CONSISTENT = {
    # Llama 3 (arXiv 2407.21783), table 4.
    "context parallelism is an axis of the mesh": (
        "gpus,tp,cp,pp,dp\n8192,8,1,16,64\n16384,8,1,16,128\n16384,8,16,16,8\n",
        ["gpus=devices", "tp=tp", "cp=cp", "pp=pp", "dp=dp"],
        ("8,16,16,8", "8,16,16,4"),
        "dp4 x tp8 x pp16 x cp16 are not 1.638e+04 devices",
    ),
    # DLPerf's InsightFace report: a column of OneFlow and one of MXNet.
    "two runs side by side are not one run": (
        "n,batch,OneFlow,MXNet\n1,64,245,218\n8,64,1800,1700\n",
        ["n=devices", "batch=batch_size", "OneFlow=throughput", "MXNet=throughput", "--fact", "model=face"],
        ("8,64", "1,64"),
        "repeats-disagree",
    ),
    # Public notes on upgrading accelerators: H200 and B200 side by side.
    "columns of two runs are audited apart": (
        "len,H200,MFU 1,B200,MFU 2\na,447,45%,834,37%\nb,463,47%,771,34%\nc,461,47%,778,35%\n",
        ["H200=tflops", "MFU 1=mfu", "B200=tflops", "MFU 2=mfu", "--fact", "model=x", "device=x"],
        ("37%", "47%"),
        "B200 over MFU is",
    ),
    # Colossal-AI's benchmark: rows differ in the parallelism.
    "cells of a column without a role tell runs apart": (
        "gpus,size,setting,samples/s\n16,70B,zero2,3.27\n16,70B,tp2+pp4,5.66\n",
        ["gpus=devices", "size=parameters", "samples/s=throughput"],
        ("tp2+pp4", "zero2"),
        "repeats-disagree",
    ),
    # DLPerf's HugeCTR: rows differ in the batch.
    "figures of a column without a role tell runs apart": (
        "gpus,size,setting,samples/s\n16,70B,512,3.27\n16,70B,1024,5.66\n",
        ["gpus=devices", "size=parameters", "samples/s=throughput"],
        ("1024", "512"),
        "repeats-disagree",
    ),
    "an empty cell of a column without a role tells runs apart": (
        "gpus,size,setting,samples/s\n16,70B,,3.27\n16,70B,1024,5.66\n",
        ["gpus=devices", "size=parameters", "samples/s=throughput"],
        ("1024", ""),
        "repeats-disagree",
    ),
    # InternEvo's performance tables: TFLOPS with activation checkpointing include the second forward pass.
    "words of a column without a role may change how FLOPs are counted": (
        "Activation Ckpt,GPU Num,TGS,TFLOPS\nTRUE,8,3314,193\nFALSE,16,4103,183\n",
        ["GPU Num=devices", "TGS=tokens_per_s_per_device", "TFLOPS=tflops", "--fact", "model=7b"],
        ("FALSE", "TRUE"),
        "tflops-tokens",
    ),
}
"""Tables in which nothing contradicts itself -> roles and facts, a change, and the finding after it."""


@pytest.mark.parametrize("name", CONSISTENT)
def test_a_consistent_table_contradicts_itself_after_one_change(audited, name):
    text, roles, change, said = CONSISTENT[name]
    code, out = audited(text, *roles)
    assert (0, False) == (code, said in out)
    code, out = audited(text.replace(*change), *roles)
    assert (1, True) == (code, said in out)


def test_repeats_of_one_run_are_one_finding(audited):
    """DLPerf's ResNet50 table of OneFlow has seven repeats, which were 21 pairs."""
    table, roles = "gpus,ms\n8,100\n16,52\n8,101\n8,104\n", ["gpus=devices", "ms=latency:ms"]
    code, out = audited(table, *roles)
    assert (0, True) == (code, "row 1 (8), row 3 (8) and row 4 (8) are the same run: 4.00% apart" in out)
    code, out = audited(table.replace("8,101", "8,130"), *roles)
    assert (1, 1) == (code, out.count("are the same run and 30% apart"))


SUMMARIES = [
    *("Average", "**Mean**", "Avg.", "Median (3 runs)", "Geomean", "Std", "stdev", "Std. Dev.", "Max", "Min", "Total"),
    "平均",
]


@pytest.mark.parametrize("name", [*SUMMARIES, "c", "P40", "STDiT", "Standard"])
def test_a_row_that_summarises_others_is_named_and_not_a_run(audited, name):
    roles = ["gpus=devices", "ms=latency:ms", "samples/s=throughput", "--fact", "global_batch_size=32"]
    rows = ("run|gpus|ms|samples/s", "-|-|-|-", "a|8|100|320", "b|8|100|320", f"{name}|24|300|960")
    code, out = audited("\n".join(rows), *roles, name="runs.md")
    is_run = name not in SUMMARIES
    line = f"not checked, as they summarise other rows: row 3 ({name.strip('*')})\n"
    assert (int(is_run), not is_run) == (code, line in out)


def test_a_total_of_parts_is_checked_by_its_own_rule(audited):
    code, out = audited("part,ms\na,10\nb,30\nTotal,60\n", "part=case", "ms=part:ms")
    assert (1, True) == (code, "row 3 (Total): ms is printed" in out)


def test_a_table_in_utf_16_is_read_and_a_compressed_one_refused(tmp_path, capsys):
    path = tmp_path / "windows.csv"
    path.write_bytes(CSV.encode("utf-16"))
    assert run(capsys, "audit", path, "--roles", *ROLES_OF_CSV)[0] in (0, 1)
    path.write_bytes(gzip.compress(CSV.encode()))
    assert "it is compressed; unpack it first" in refused(capsys, "audit", path, "--roles", *ROLES_OF_CSV)
