"""The page: every section of a run in one file, equal bytes, hostile text as text, and runs with little to show."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.record.run import GateRecord, Revision, RunEnd
from perfsuite.record.verdict import Verdict
from perfsuite.reports.changes import changes_between, ratio
from perfsuite.reports.document import Chart, Charts, Grid, Section
from perfsuite.reports.material import material_of
from perfsuite.reports.page import page
from perfsuite.reports.page.charts import look
from perfsuite.reports.page.charts import rows as charts
from perfsuite.reports.page.page import renderer
from perfsuite.reports.page.sections.cases import section as all_cases
from perfsuite.reports.page.sections.verdict import sentence, title_of
from perfsuite.reports.stored import Recording
from test_correctness.helpers.pages import Read, everything, gpt, many, material, product, record, rendered
from test_correctness.helpers.runs import remeasured, verdict

HOSTILE = "<script>alert(1)</script>\"'>]]>javascript:x \x1b[31m \u202eevil\ud800 &amp; {{ 7 * 7 }}"


@pytest.fixture(scope="module")
def whole():
    """The page of a run with something for every section."""
    with pytest.MonkeyPatch.context() as patch:
        return rendered(patch, *everything())


def test_every_section_has_something_to_show(whole):
    read = Read(whole)
    keys = " ".join(found.removeprefix("s-") for found in read.ids() if found.startswith("s-"))
    assert keys == "verdict device collectives training scaling options pipelines checklist cases environment"
    assert read.ids() == list(dict.fromkeys(read.ids()))  # no anchor twice
    figures = [tag for tag, _ in read.tags if tag == "figure"]
    assert 8 < len(figures) <= page.MOST_CHARTS


def test_the_title_has_the_verdict_the_hardware_the_commit_and_the_date():
    cases = [gpt("test_ddp", ranks, 1.0) for ranks in (1, 2)]
    verdicts = (verdict(cases[0].case), verdict(cases[1].case, "pass", 0.0))
    gate = GateRecord(gate=True, fail_on=("regressed",), verdicts=verdicts)
    facts = {"revision": Revision(commit="abc1234def5678", dirty=True), "started_at": "2026-11-25T10:00:00+00:00"}
    whole = title_of(material(*cases, gate=gate, **facts))
    assert whole == "FAIL: 1 slower, 1 unchanged - a100 - commit abc1234def56 with uncommitted changes - 2026-11-25"
    passing = dataclasses.replace(gate, verdicts=verdicts[1:])
    assert title_of(material(*cases, gate=passing, **facts)).startswith("PASS: 1 unchanged - a100")
    end = RunEnd(at="", took_s=1.0, exit_status=1)
    assert title_of(material(*cases, gate=passing, end=end)).startswith("1 unchanged - a100")
    assert title_of(material(*cases)).startswith("2 measured - a100")
    assert title_of(material(failures={"t.py::a": "boom"})).startswith("FAIL: 1 failed")
    text = page.render(material(*cases, gate=gate, **facts))
    assert f"<title>{whole}</title>" in text
    assert f"<h1>{whole}</h1>" in text


def test_the_next_command_and_the_tiles_come_before_the_warnings(monkeypatch):
    cases = [gpt("test_ddp", 1, 1.0), product(256, "fp32", 50.0)]
    slower = dataclasses.replace(verdict(cases[0].case), stored_commit="abc1234def")
    gate = GateRecord(gate=True, fail_on=("regressed",), verdicts=(slower,), banner=("the budget ended",))
    text = Read(rendered(monkeypatch, *cases, gate=gate)).text
    commands = "perfsuite ab --a abc1234def.*perfsuite show journal.jsonl"
    assert re.search(f"1 case slower.*{commands}.*fp32 compute.*warning: the b", text)


def test_findings_do_not_repeat_the_table_of_changes(monkeypatch):
    cases = [gpt(f"test_ddp_{number}", 1, 1.0) for number in range(9)]
    verdicts = tuple(verdict(one.case) for one in cases)
    gate = GateRecord(gate=True, fail_on=("regressed",), verdicts=verdicts)
    read = Read(rendered(monkeypatch, *cases, gate=gate))
    assert 3 == sum(tag == "li" and found.get("class") == "bad" for tag, found in read.tags)
    assert "and 6 more; Changes lists all changed cases" in read.text


def test_a_chart_without_picture_and_table_leaves_no_heading(monkeypatch):
    sections = [
        Section(key="a", title="a", blocks=[Charts(charts=[Chart(title="nothing below", spec={"mark": "bar"})])])
    ]
    monkeypatch.setattr(page, "renderer", lambda: None)
    assert "nothing below" not in page._render("t", sections, {}, simulated=False)


def test_axes_have_a_unit_and_no_prefix_of_a_power_of_ten(monkeypatch):
    specs = []
    rendered(monkeypatch, *everything(), draw=lambda spec, *names: specs.append(spec) or "<svg></svg>")
    text = json.dumps(specs)
    assert "~s" not in text
    for unit in ("s per step", "GiB per device", "TFLOPS", "busbw, GB/s"):
        assert f'"title": "{unit}"' in text


def test_labels_tell_cases_apart_that_share_words():
    texts = [f"{test}_everywhere ws8-64MiB-bf16" for test in ("memory", "host_link", "matmul")]
    texts += [f"matmul_everywhere ws{ranks}-256x256x256-bf16" for ranks in (2, 8)]
    found = look.labels(texts)
    assert len(set(found)) == len(texts)
    assert not any("(2)" in label or len(label) > look.LABEL for label in found)


def test_no_section_takes_the_charts_of_the_others():
    grid = Grid(title="", columns=("a",), rows=(), notes=())
    first, second, third = ([Chart(title="c", spec={"mark": "bar"}, grid=grid) for _ in range(n)] for n in (30, 1, 4))
    undrawn = Chart(title="without points", spec={}, grid=grid)
    sections = [
        Section(key=str(at), title="", blocks=[Charts(charts=charts)])
        for at, charts in enumerate((first, [undrawn, *second], third))
    ]
    expected = [*first[: page.MOST_CHARTS - 5], *second, *third]
    assert page.drawn_charts(sections) == {id(chart) for chart in expected}


def test_equal_runs_give_equal_bytes_without_a_request(whole, monkeypatch):
    assert rendered(monkeypatch, *everything()) == whole
    names = ("src", "href", "data", "action", "srcset", "xlink:href")
    addresses = [found[name] for _, found in Read(whole).tags for name in names if name in found]
    assert all(address.startswith("#") for address in addresses)
    assert "url(http" not in whole
    assert "@import" not in whole


def test_links_lead_somewhere(whole):
    read = Read(whole)
    wanted = {found["href"][1:] for tag, found in read.tags if tag == "a"}
    assert wanted <= set(read.ids())
    assert any(target.startswith("c-") for target in wanted)


def test_the_policy_allows_only_the_style_and_the_script_of_the_page(whole):
    read = Read(whole)
    (policy,) = [found["content"] for tag, found in read.tags if found.get("http-equiv")]
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-\S+'; script-src 'sha256-\S+'; base-uri 'none'", policy)
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert not [found for _, found in read.tags if "style" in found or any(name.startswith("on") for name in found)]


def test_a_page_of_real_charts_draws_each_with_a_name(monkeypatch):
    if renderer() is None:
        pytest.skip("vl-convert-python is not installed")
    text = rendered(monkeypatch, *everything()[:6], draw=renderer())
    read = Read(text)
    pictures = [found for tag, found in read.tags if tag == "svg" and found.get("class") == "marks"]
    assert len(pictures) == 2
    assert all(found["role"] == "img" and found["aria-label"] for found in pictures)
    assert "style=" not in text
    colours = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', text.partition("</style>")[2]))
    assert colours <= {look.INK, look.MUTE, look.GRID, "#fdfdfe", *look.PALETTE, look.GOOD, look.BAD, look.DOUBT}


def test_every_colour_of_a_chart_has_one_for_the_dark():
    style = (page.resources.files("perfsuite.reports.page") / "templates" / "style.css").read_text()
    dark = style.partition("prefers-color-scheme:dark")[2]
    for colour in (look.INK, look.MUTE, *look.PALETTE, look.GOOD, look.BAD, look.DOUBT):
        assert f'[fill="{colour}"]' in dark
        assert f'[stroke="{colour}"]' in dark or colour == look.INK


def test_hostile_text_is_shown_as_text(monkeypatch):
    first = product(256, "fp32", 50.0)
    facts = {"devices": [HOSTILE], "topology": f"{HOSTILE}\nsecond line", "variables": {"NCCL_X": HOSTILE}}
    first = dataclasses.replace(first, environment=facts)
    evil = dataclasses.replace(
        first, case=f"test_perf/t.py::test_x[{HOSTILE}]", parameters={**first.parameters, HOSTILE: HOSTILE}
    )
    long = dataclasses.replace(first, case=f"t.py::test_y[{'x' * 10_000}]")
    meaning = {"failures": {f"t.py::{HOSTILE}": HOSTILE}, "skips": {"t.py::s": HOSTILE}}
    text = rendered(monkeypatch, evil, long, **meaning)
    text.encode("utf-8")  # no half of a character is left
    read = Read(text)
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "x" * 1000 not in text
    assert "<script>alert(1)</script>" in read.text
    assert "{{ 7 * 7 }}" in read.text
    assert "second line" in read.text


def test_a_renderer_is_given_text_that_it_can_encode(monkeypatch):
    given = []
    fake = type("vl_convert", (), {"vegalite_to_svg": lambda spec: given.append(spec) or "<svg></svg>"})
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", fake)
    renderer()({"data": [{"told": HOSTILE}]}, HOSTILE, "k")
    json.dumps(given).encode("utf-8")
    assert "\\u202e" in given[0]["data"][0]["told"]


def test_paths_and_names_of_users_stay_out(monkeypatch):
    failures = {"t.py::test_a": "no room in /home/somebody/secret/run.json"}
    text = rendered(monkeypatch, *everything(), failures=failures)
    assert "somebody" not in text
    assert "run.json" in text
    assert "host0" not in text


def test_names_of_hosts_stay_only_where_they_are_asked_for(monkeypatch):
    first, *others = everything()
    here = dataclasses.replace(first, environment={"hostname": "node17"})
    run = record(here, *others, failures={"t.py::b": "rank 3 on node17 died"})
    monkeypatch.setattr(page, "renderer", lambda: None)
    told = [page.render(material_of([Recording(run=run)], show_hosts=shown)).count("node17") for shown in (False, True)]
    assert told[0] == 0 < told[1]


def test_a_chart_has_numbers_for_hosts_as_its_table_has(monkeypatch):
    drawn = []
    first, *others = (dataclasses.replace(one, environment={"hostname": "gpt2-xl"}) for one in everything())
    rendered(monkeypatch, first, *others, draw=lambda spec, *names: drawn.append((spec, *names)) or "")
    assert drawn
    assert not re.search(r"(?<![\w-])gpt2-xl(?![\w-])", str(drawn))
    assert "host 1" in str(drawn)


@pytest.mark.parametrize(
    ("results", "meaning", "told"),
    [
        ((), {}, "no cases"),
        ((gpt("test_ddp", 1, 1.0),), {}, "1 measured"),
        ((), {"failures": {"t.py::a": "boom", "t.py::b": "boom"}}, "2 failed"),
        ((gpt("test_ddp", 1, 1.0, oom="OOM at 3 GiB of 4"),), {}, "1 out of memory"),
        ((dataclasses.replace(gpt("test_ddp", 1, 1.0), outcome="smoke"),), {}, "not measured"),
        ((dataclasses.replace(gpt("test_ddp", 1, 1.0), simulated=True),), {}, page.SIMULATED),
    ],
    ids=["nothing", "one", "all failed", "all out of memory", "smoke", "simulated"],
)
def test_runs_with_little_to_show_have_a_page(monkeypatch, results, meaning, told):
    assert told in Read(rendered(monkeypatch, *results, **meaning)).text


def test_every_chart_of_simulated_devices_says_so(monkeypatch):
    specs = []
    simulated = (dataclasses.replace(one, simulated=True) for one in everything())
    rendered(monkeypatch, *simulated, draw=lambda spec, *names: specs.append(spec) or "<svg></svg>")
    assert len(specs) > 8
    assert all(spec["title"]["text"] == page.SIMULATED for spec in specs)


def test_a_result_above_a_measured_peak_has_no_share(monkeypatch):
    read = Read(rendered(monkeypatch, product(256, "fp32", 5000.0, kind="measured")))
    assert "above the measured peak" in read.text
    assert "5000%" not in read.text
    assert "5000 %" not in read.text


def test_the_first_sentence_has_the_worst_and_the_best():
    results = [gpt("test_ddp", ranks, 1.0) for ranks in (1, 2, 4)]
    slower, same, faster = (result.case for result in results)
    verdicts = (verdict(slower), verdict(same, "pass", 0.01), verdict(faster, "improved", -0.2))
    said, _ = sentence(material(*results, gate=GateRecord(gate=True, fail_on=("regressed",), verdicts=verdicts)))
    worst = "1 case slower, worst test_ddp[a100-ws1-gpt2-xl] +8.1 % [+6.2, +10.0]"
    assert said.startswith(f"{worst}; 1 case faster, best test_ddp[a100-ws4-gpt2-xl] ")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("pass", "inconclusive"), "No case is shown to be slower; 1 undecided; 1 unchanged. 2 measured."),
        (("inconclusive",) * 2, "None of 2 cases is decided: runs differ too much"),
    ],
)
def test_what_was_not_decided_does_not_read_as_if_all_were_well(names, said):
    results = [gpt("test_ddp", ranks, 1.0) for ranks in (1, 2)]
    verdicts = tuple(
        verdict(one.case, name, 0.01, interval=(-0.3, 0.3)) for one, name in zip(results, names, strict=True)
    )
    assert sentence(material(*results, gate=GateRecord(gate=True, verdicts=verdicts)))[0].startswith(said)


def test_runs_that_are_alike_are_no_difference():
    def runs(*times_s):
        made = [Recording(run=record(gpt("test_ddp", 1, time_s))) for time_s in times_s]
        return made[0] if len(made) == 1 else made

    before, after = (material_of(runs(*(1 + offset for offset in offsets))) for offsets in [(0.0, 1e-3, 2e-3)] * 2)
    (found,) = changes_between(before.timed, after.timed)
    assert (found.word, found.tone) == ("no difference", "plain")


def test_an_interval_beyond_measure_leaves_room_for_the_others():
    values = [{"row": "a", "at": 0.05, "low": -0.9, "high": 5e4, "tone": "plain", "told": ""}]
    domain = charts.forest(values, ["a"], "")["layer"][2]["encoding"]["x"]["scale"]["domain"]
    assert domain == pytest.approx([-0.995, 1.095])


def test_an_arm_without_a_header_has_the_torch_of_its_environment():
    plain = dataclasses.replace(gpt("test_ddp", 1, 1.0), environment={"packages": {"torch": "2.13"}})
    assert material(plain).runs[0].run.torch == "2.13"
    assert material(gpt("test_ddp", 1, 1.0)).runs[0].run.torch == ""


def test_sentences_that_begin_with_a_number_stand_to_the_left():
    rows = (("a", "1.2 GB/s", "1.2 GB/s bus bandwidth (test_broadcast[16MiB-fp32], 2 ranks)"),)
    assert page.right_columns(Grid(title="", columns=("x", "rate", "why"), rows=rows, notes=())) == [False, True, False]
    rows = (("a", "0027cccccc", "10.4"), ("b", "00271234", "11"))
    assert page.right_columns(Grid(title="", columns=("x", "commit", "ms"), rows=rows)) == [False, False, True]


def test_a_base_is_compared_case_by_case_and_one_run_each_is_unsure():
    known = material(gpt("test_ddp", 1, 2.0), base=record(gpt("test_ddp", 1, 1.0)))
    (found,) = known.changes
    assert (found.effect, found.low, found.tone, found.word) == (1.0, None, "plain", "unsure: one run each")
    assert sentence(known)[1] is False


def test_several_runs_against_several_have_an_interval_that_holds_the_truth():
    effect, low, high = ratio([1.0, 1.02, 0.98, 1.0], [1.1, 1.12, 1.09])
    assert low < effect < high
    assert low > 0
    assert ratio([1.0, 1.3, 0.8], [1.05, 1.3, 0.8])[1] < 0  # as noisy as they are: nothing is shown


def test_more_cases_than_fit_are_counted(monkeypatch):
    monkeypatch.setattr("perfsuite.reports.page.sections.cases._ROWS_BYTES", 800)
    (block,) = all_cases(material(*everything())).blocks
    assert 0 < len(block.rows) < len(everything())
    assert "than the page can hold" in block.more


def test_a_page_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "renderer", lambda: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written: Not a directory"):
        page.write_page(material(), tmp_path / "file" / "page.html")


def test_many_cases_are_folded_and_those_that_need_a_reader_come_first():
    (table,) = all_cases(material(*many(700))).blocks
    names = [row.name for row in table.open_rows]
    assert (300, "test_matmul[a100-99]", "test_matmul[a100-0]") == (len(names), names[0], names[7])
    titles = [title for title, _ in table.folds]
    assert titles[1] == "601 to 700: test_matmul[a100-598] to test_matmul[a100-698]"
    read = Read(page.render(material(*many(700))))
    assert 700 == sum(tag == "tr" and found.get("id", "").startswith("c-") for tag, found in read.tags)
    assert 2 == sum(tag == "details" and found.get("class") == "fold" for tag, found in read.tags)


def test_few_cases_stand_in_their_order_unfolded():
    (table,) = all_cases(material(*many(300))).blocks
    assert [] == list(table.folds)
    assert [f"test_matmul[a100-{place}]" for place in range(300)] == [row.name for row in table.rows]


@pytest.mark.parametrize(("name", "angle"), [("rank 0", -90), ("0", 0)])
def test_figures_and_names_of_a_matrix_have_room(name, angle):
    values = [{"first": "a", "second": name, "value": value, "text": "0.99", "told": ""} for value in (1.0, 3.0)]
    spec = charts.matrix(values, ["a"], [name], ("", ""))
    assert spec["width"]["step"] >= 6 * len("0.99")
    assert spec["encoding"]["x"]["axis"]["labelAngle"] == angle
    assert "datum.value>2.475" in str(spec), "white letters on the darkest quarter alone"


@pytest.mark.parametrize(("longest", "columns"), [(8, None), (20, 2), (26, 1)])
def test_a_legend_is_no_wider_than_its_chart(longest, columns):
    assert look.coloured("series", ["a", "b" * longest])["legend"].get("columns") == columns


def test_a_column_that_says_the_same_of_every_case_is_one_sentence():
    several = [gpt("test_ddp", ranks, 1.0) for ranks in (1, 2)]

    def table_of(*names):
        verdicts = tuple(Verdict(case=one.case, name=name) for one, name in zip(several, names, strict=True))
        (table,) = all_cases(material(*several, gate=GateRecord(gate=False, verdicts=verdicts))).blocks
        return table

    same, other = table_of("no-baseline", "no-baseline"), table_of("no-baseline", "pass")
    assert ("verdict" in same.columns, "Verdict of each: no-baseline." in same.more) == (False, True)
    assert ("verdict" in other.columns, "Verdict" in other.more) == (True, False)


def test_disturbed_figures_are_marked_and_not_drawn(monkeypatch):
    calm, other = product(256, "bf16", 50.0), product(512, "bf16", 60.0)
    rank = dataclasses.replace(other.measurement.ranks[0], device="cpu", cpu_share=0.4)
    other = remeasured(other, ranks=(rank,), aligned=True)
    specs = []
    read = Read(rendered(monkeypatch, calm, other, draw=lambda spec, *names: specs.append(spec) or "<svg></svg>"))
    assert "~60 TFLOPS" in read.text
    assert "~ disturbed by other programs: 1 case, not drawn" in read.text
    assert "60 TFLOPS" not in json.dumps(specs)
    assert "50 TFLOPS" in json.dumps(specs)
    alone = Read(rendered(monkeypatch, other, draw=lambda *_: "<svg></svg>"))
    assert not [tag for tag, _ in alone.tags if tag == "figcaption" and "Roofline" in alone.text]
