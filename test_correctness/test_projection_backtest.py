"""Back-tests: projections of published steps that they were not fitted to stay within their budgets."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.backtest import leave_one_out, runs
from benchmarks.backtest.__main__ import main as backtest
from benchmarks.backtest.fit import Free, fit
from benchmarks.backtest.leave_one_out import Backtested
from benchmarks.backtest.rows import published_steps
from benchmarks.backtest.tables import TABLES, contradicting, memory_share
from perfsuite.base.errors import ConfigurationError
from perfsuite.projection import operations, softwares, stages
from perfsuite.projection.kernels import NONE, Links
from perfsuite.projection.pipeline import PricedPipeline
from perfsuite.record.codec import to_json
from test_correctness.helpers.command_line import as_json, printed

FAST = ("megatron-2022-a100", "oneflow-v100")


def hold(tested: Backtested) -> None:
    assert tested.within_budget, f"{tested.name}: {tested.summary} for at most {tested.budget}"


MARKED = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in TABLES]


@pytest.mark.parametrize("name", MARKED)
def test_a_model_is_predicted_from_the_others(name):
    hold(leave_one_out.run(TABLES[name]))


@pytest.mark.parametrize(
    "tested",
    [
        runs.run_kernels,  # and one step predict other layouts, lengths and experts
        lambda: [runs.run_memory()],
        pytest.param(lambda: runs.run_one_device("a100"), marks=pytest.mark.slow),
        pytest.param(lambda: runs.run_one_device("h100"), marks=pytest.mark.slow),
        pytest.param(runs.run_one_node, marks=pytest.mark.slow),
    ],
    ids=["kernels", "memory", "a100", "h100", "one node"],
)
def test_a_part_predicts_the_rest(tested):
    for each in tested():
        hold(each)


def test_the_first_choice_is_near_the_measured_best_which_is_among_its_ties():
    groups = runs.advised()
    assert len(groups) == 10
    hold(runs.run_advisor())
    for group in groups:
        assert group.best in group.ties, group.name
        assert len(group.ties) <= -(-len(group.measured_s) // 2), group.name


FOUNDRY = [name for name in TABLES if name.startswith("llm-foundry")]


@pytest.mark.parametrize("name", FOUNDRY)
def test_a_step_that_was_measured_fits_its_card(name):
    """All of these ran: an estimate above the card says more of the estimate than of the step."""
    shares = {row.id: memory_share("llm-foundry", row) for row in published_steps(name)}
    assert 0.9 < max(shares.values()) < 1.0, shares


def step(**changes):
    row = next(row for row in published_steps("llm-foundry-a100") if row.id.endswith("760m-2048-8-384"))
    layout = dataclasses.replace(row.layout, **changes.pop("layout", {}))
    plain = dataclasses.replace(row.architecture, tokens=changes.pop("tokens", row.architecture.tokens))
    return dataclasses.replace(row, layout=layout, architecture=plain, **changes)


@pytest.mark.parametrize(
    ("other", "contradicts"),
    [
        ({}, True),
        ({"tokens": 4096, "layout": {"micro_batch_size": 12}}, True),  # longer, as many tokens
        ({"tokens": 1024, "layout": {"micro_batch_size": 48}}, False),  # shorter
        ({"layout": {"micro_batch_size": 48}}, False),  # twice as many tokens for what is gathered
        ({"layout": {"num_micro_batches": 4}}, False),  # twice as many for an update
        ({"layout": {"checkpointing": "full"}}, False),
        ({"model": "mpt-1b"}, False),
    ],
)
def test_a_row_is_contradicted_by_one_that_does_no_less_for_a_token_and_is_clearly_faster(other, contradicts):
    row, harder = step(), step(**other)
    for faster, expected in ((1.04, False), (1.06, contradicts)):
        rate = harder.tokens_per_s * harder.step_time_s  # tokens of a device's step
        measured = dataclasses.replace(harder, step_time_s=rate / (faster * row.tokens_per_s))
        assert expected == (contradicting(row, [row, measured]) is not None)


def test_more_devices_contradict_fewer_and_not_the_other_way_round():
    rows = [row for row in published_steps("llm-foundry-a100-40") if row.model == "mpt-1b"]
    slow = next(row for row in rows if row.id.endswith("2048-32-320"))
    others = {row.layout.world_size: row for row in rows if row.architecture.tokens == 2048}
    assert contradicting(slow, [others[64]]) is others[64]
    assert contradicting(slow, [others[16]]) is None


@pytest.mark.slow
def test_rows_that_are_left_out_are_predicted_beside_the_others(capsys):
    assert backtest(["llm-foundry-h100", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    beside = table["errors_left_out"]
    assert set(table["left_out"]) == set(beside)
    assert not set(table["errors"]) & set(beside)
    assert min(beside.values()) < -15 < -table["max_percent"]  # what ran at the limit of its memory
    assert table["every_row_percent"][2] == pytest.approx(max(map(abs, beside.values())))
    assert backtest(["llm-foundry-h100", "--rows"]) == 0
    out = capsys.readouterr().out
    row, error = min(beside.items(), key=lambda pair: pair[1])
    assert any(f"{error:+6.1f} % left out: {table['left_out'][row]}" in line for line in out.splitlines())


@pytest.mark.slow
def test_bands_are_those_of_the_rows_and_hold_most_of_them():
    """Of the rows 70 to 90 % lie inside; in a table by itself the band is as honest as its neighbours are alike."""
    from perfsuite.projection.step import FILE

    assert json.loads(FILE.read_text()) == runs.bands()
    assert json.loads(softwares.FILE.read_text()) == [to_json(one) for one in runs.shipped_constants()]
    band = json.loads(FILE.read_text())["in situ"]
    errors = [error for table in TABLES.values() for error in leave_one_out.run(table).errors]
    ratios = [error.row.step_time_s / error.predicted_s for error in errors]
    inside = sum(band["low"] <= ratio <= band["high"] for ratio in ratios) / len(ratios)
    assert 0.7 <= inside <= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_no_constant_ran_into_a_bound(name):
    found = leave_one_out.fitted(TABLES[name], [r for r in published_steps(name) if not TABLES[name].leave_out(r)])
    for free in TABLES[name].free:
        if free.share:
            assert 0.05 < found[free.name] < 0.97
    assert not {free.name for free in TABLES[name].free if abs(free.inner(found[free.name])) >= 3}


# -- a term that is taken out breaks a budget (others break an exact test: see docs projection-evidence) -----------


def without_recompute(monkeypatch):
    block = operations.block
    monkeypatch.setattr(
        operations, "block", lambda share, **kind: dataclasses.replace(block(share, **kind), recompute=())
    )


def without_traffic(monkeypatch):
    monkeypatch.setattr(operations.MemoryKernels, "__init__", _no_bytes(operations.MemoryKernels.__init__))
    operations.block.cache_clear()


def _no_bytes(make):
    def init(self, *, moved_bytes, kernels=1):
        make(self, moved_bytes=0.0, kernels=kernels)

    return init


def without_messages(axis):
    def take_out(monkeypatch):
        links = Links.seconds

        def seconds(self, collective, message_bytes, group, *more):
            same = group is not None and (group.stride == 1) == (axis == "tp") and collective != "send_recv"
            return NONE if same else links(self, collective, message_bytes, group, *more)

        monkeypatch.setattr(Links, "seconds", seconds)

    return take_out


def without_bubble(monkeypatch):
    monkeypatch.setattr(PricedPipeline, "step_s", lambda self, **how: self.busiest_s)


def without_stage_messages(monkeypatch):
    monkeypatch.setattr(stages.StagePrices, "_stage_message", lambda self, layout, groups: NONE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("take_out", "name"),
    [
        (without_recompute, "megatron-2022-a100"),
        (without_traffic, "megatron-2022-a100"),
        (without_messages("tp"), "oneflow-v100"),
        (without_messages("dp"), "oneflow-v100"),
        (without_bubble, "oneflow-v100"),
        (without_stage_messages, "oneflow-v100"),
        (without_messages("tp"), "llm-foundry-a100-40"),
    ],
    ids=["recompute", "traffic", "tensor messages", "data messages", "bubble", "stage messages", "gathers"],
)
def test_a_table_notices_a_term_that_is_missing(take_out, name, monkeypatch):
    kept = operations.block
    take_out(monkeypatch)
    try:
        tested = leave_one_out.run(TABLES[name])
    finally:
        kept.cache_clear()  # what a mutation made must not meet another test
    assert not tested.within_budget, tested.summary


@pytest.mark.parametrize("component", ["weight_bytes", "gradient_bytes", "optimizer_state_bytes", "kept_whole_bytes"])
def test_memory_notices_a_component_that_is_missing(component, monkeypatch):
    code = dataclasses.replace(softwares.SOFTWARES["simumax"], **{component: 0.0})
    monkeypatch.setattr(softwares, "SOFTWARES", {**softwares.SOFTWARES, "simumax": code})
    assert not runs.run_memory().within_budget


# -- the fit and the command -------------------------------------------------------------------------------------------


def test_a_fit_finds_what_made_the_times():
    free = (Free(name="rate", expected=2.0, spread=1.0), Free(name="share", expected=0.5, spread=1.0, share=True))

    def predict(values):
        return [size / values["rate"] + values["share"] for size in (1.0, 3.0, 10.0, 30.0)]

    found = fit(free, predict, predict({"rate": 5.0, "share": 0.8}), noise=1e-4)
    assert found == pytest.approx({"rate": 5.0, "share": 0.8}, rel=1e-3)


def test_every_row_names_its_source():
    for table in TABLES.values():
        assert all(step.source for step in published_steps(table.file))


def test_the_command_prints_tables_and_refuses_names_that_there_are_not(capsys):
    assert backtest(["memory", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert (table["table"], table["rows"]) == ("memory", 31)
    with pytest.raises(SystemExit, match="2"):
        backtest(["memry"])
    assert "did you mean memory" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="did you mean"):
        published_steps("nemo")


COMMAND = ["project", "--model", "llama2-7b", "--platform", "a100", "--global-batch", "64"]


def test_a_projection_is_printed_with_its_band_parts_and_constants(capsys):
    out = printed(capsys, *COMMAND, "--layout", "dp4-tp2-pp2", "--sensitivity", "--curve", "16..64")
    for words in ("80 % band", "tokens_per_s", "mfu_percent", "matmul", "1 % more gains", "binding", "efficiency"):
        assert words in out


def test_a_projection_as_json_is_of_a_kind_of_its_own(capsys, tmp_path):
    trace = tmp_path / "trace.json"
    plain = as_json(capsys, *COMMAND, "--layout", "pp4-dp2", "--trace", trace)
    assert plain["kind"] == "projected"
    assert plain["step_time_s"] == pytest.approx(sum(part["seconds"] for part in plain["parts"]))
    assert json.loads(trace.read_text())["otherData"]["source"] == "simulated"
