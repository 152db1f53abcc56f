"""Which back-tests there are: tables, one device for another, one node for many, memory; and the bands they give."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from benchmarks.backtest.choices import Choice, choices_of, choices_of_bloom
from benchmarks.backtest.fit import Constants, Free, fit
from benchmarks.backtest.kernels import measured_kernels
from benchmarks.backtest.leave_one_out import Backtested, Error, MemoryRow, fitted, own_step, predict, run, steps_of
from benchmarks.backtest.rows import PublishedStep, published_steps
from benchmarks.backtest.tables import (
    ATTENTION,
    CLUSTER,
    KERNEL,
    TABLES,
    TORCHTITAN,
    TRAFFIC,
    BacktestTable,
    held_out,
    kept,
    platform_of,
)
from perfsuite.base.errors import ConfigurationError, did_you_mean
from perfsuite.base.units import GIB
from perfsuite.projection.memory import memory_of
from perfsuite.projection.softwares import Fitted, constants_for
from perfsuite.projection.step import kinds_of

FEWEST_ROWS = 20
"""Fewest rows for a band of one device and dtype."""
B200: Mapping[str, float] = MappingProxyType(
    {"memory": 0.666, "link": 0.72, "link_us": 8.0, "matmul": 0.48, "attention": 0.6}
)
"""Shares of B200's sheet that its microbenchmarks reach, for operations without a measured kernel."""
IN_SITU_ROW = "simumax/b200/llama3_405b_l4_tp2_pp1_dp4_mbc8_cef"
"""The one step that B200's kernels are tied to."""


def run_kernels() -> tuple[Backtested, Backtested, Backtested]:
    """B200 from its measured kernels: (kernels alone on dense models, with one step, the same on experts)."""
    rows = published_steps("simumax-b200")
    kernels = measured_kernels("b200-microbenchmarks")
    values = B200
    dense = [row for row in rows if not row.architecture.experts]
    experts = [row for row in rows if row.architecture.experts]
    one = next(row for row in rows if row.id == IN_SITU_ROW)
    situ = _in_situ(one)
    results = []
    for name, title, own, more, budget in (
        ("b200-kernels", "B200 dense, kernels alone", dense, {}, (12.0, 16.0, 20.0)),
        (
            "b200-dense",
            "B200 dense, kernels and one step",
            [row for row in dense if row is not one],
            situ,
            (4.5, 9.0, 14.0),
        ),
        ("b200-experts", "B200 experts, the same", experts, situ, (8.0, 12.0, 15.0)),
    ):
        times = predict(own, "simumax", {**values, **more}, kernels)
        errors = tuple(Error(row, time) for row, time in zip(own, times, strict=True))
        left = {one.id: "the step that kernels are tied to"} if name == "b200-dense" else {}
        results.append(Backtested(name=name, title=title, errors=errors, left_out=left, constants=more, budget=budget))
    return results[0], results[1], results[2]


def _in_situ(one: PublishedStep) -> dict[str, float]:
    """Return the ratio of a block of B200 to its kernels, from one step."""
    ratio = Free(name="in_situ_ratio", expected=1.1, spread=0.3)
    kernels = measured_kernels("b200-microbenchmarks")
    return fit(
        (ratio,),
        lambda found: predict([one], "simumax", {**B200, **found}, kernels),
        [one.step_time_s],
        noise=0.001,
    )


def advised() -> list[Choice]:
    """BLOOM's groups of layouts, each model by the others; B200's by kernels and one step."""
    rows = published_steps("simumax-b200")
    values = {**B200, **_in_situ(next(row for row in rows if row.id == IN_SITU_ROW))}
    steps = steps_of(rows, "simumax", values, measured_kernels("b200-microbenchmarks"))
    return [*choices_of_bloom(), *choices_of(rows, steps, "simumax", values)]


def run_advisor() -> Backtested:
    """Compare the first choice of the advisor with the measured best, in the groups of measured layouts."""
    groups = advised()
    return Backtested(
        name="advisor",
        title="the first choice against the measured best",
        errors=tuple(Error(group.best_row, group.measured_s[group.chosen]) for group in groups),
        left_out={},
        constants={},
        budget=(5, 11, 11),
    )


def run_one_device(home: str = "a100") -> tuple[Backtested, ...]:
    """llm-foundry's traits from one device, the products' rate from other softwares of each device.

    Of another device attention is taken from its own table, without the model that is predicted, for a kernel of
    attention is software and device at once, and its cluster's network from that table as it is fitted by itself.
    """
    shared = {"a100": "megatron-2022-a100", "a100-40": "megatron-2022-a100", "h100": "nemo-h100"}
    rates = {}
    for device, name in shared.items():
        rates[device] = fitted(TABLES[name], published_steps(TABLES[name].file))["matmul"]
    at_home = dataclasses.replace(
        TABLES[f"llm-foundry-{home}"],
        free=(ATTENTION, TRAFFIC, KERNEL, CLUSTER),
        fixed={"attention_backward": 0.65, "matmul": rates[home]},
    )
    own = fitted(at_home, kept(at_home))
    tested = []
    for device in (name for name in shared if name != home):
        table = TABLES[f"llm-foundry-{device}"]
        traits = {name: own[name] for name in ("traffic_ratio", "kernel_us")}
        table = dataclasses.replace(
            table,
            name=f"traits of {home} on {device}",
            title=f"llm-foundry on {device}, its traits from {home} alone",
            free=(ATTENTION,),
            fixed={"attention_backward": 0.65, "matmul": rates[device], **traits},
            derived=functools.partial(_network_of, table),
            budget=(4, 12, 15),
        )
        tested.append(run(table))
    return tuple(tested)


def _network_of(table: BacktestTable, rows: Sequence[PublishedStep]) -> Constants:
    return {"network": fitted(table, rows)["network"]}


def run_one_node() -> tuple[Backtested, ...]:
    """llm-foundry's rows on 16 to 64 devices from those on 8; the network comes from other models'."""
    tested = []
    for name in ("llm-foundry-h100", "llm-foundry-a100-40"):
        table = TABLES[name]
        rows = kept(table)
        within = dataclasses.replace(table, free=tuple(free for free in table.free if free is not CLUSTER))
        node = fitted(within, [row for row in rows if row.layout.world_size <= row.devices_per_node])
        beyond = dataclasses.replace(
            table,
            name=f"one node: {name}",
            title=f"{table.title}, 16 to 64 devices from 8",
            free=(CLUSTER,),
            fixed=node,
            among=lambda row: row.layout.world_size > row.devices_per_node,
            budget=(5, 8, 8),
        )
        tested.append(run(beyond))
    return tuple(tested)


def run_platform_row() -> Backtested:
    """Every row by its platform's row alone: typical shares of the data sheet, traits as counted."""
    errors = []
    for table in TABLES.values():
        rows = kept(table)
        times = predict(rows, table.software, {})
        errors += [Error(row, time) for row, time in zip(rows, times, strict=True)]
    return Backtested(
        name="platform-row",
        title="nothing measured: typical shares of the data sheet",
        errors=tuple(errors),
        left_out={},
        constants={},
        budget=(25, 50, 70),
    )


def run_memory() -> Backtested:
    """Allocated memory of B200's dense rows; nothing is fitted."""
    errors = []
    for row in published_steps("simumax-b200"):
        if row.memory_kind == "allocated" and not row.architecture.experts:
            total = memory_of(row.architecture, row.layout, row.implementation("simumax")).total
            errors.append(MemoryRow(row, total / GIB))
    return Backtested(
        name="memory",
        title="allocated memory of B200's dense rows",
        errors=tuple(errors),
        left_out={},
        constants={},
        budget=(2, 3, 4),
    )


def run_named(name: str) -> tuple[Backtested, ...]:
    """The back-tests of one name."""
    if name in TABLES:
        return (run(TABLES[name]),)
    runs: Mapping[str, Callable[[], tuple[Backtested, ...]]] = {
        "b200": run_kernels,
        "one-device": lambda: (*run_one_device("a100"), *run_one_device("h100")),
        "one-node": run_one_node,
        "platform-row": lambda: (run_platform_row(),),
        "software": run_software,
        "memory": lambda: (run_memory(),),
        "advisor": lambda: (run_advisor(),),
    }
    return runs[name]()


def _without(table: BacktestTable, rows: Sequence[PublishedStep] = ()) -> list[Fitted]:
    """The constants of all tables, of this one those of ``rows`` alone, or none."""
    others = [one for one in all_constants() if one.table != table.name]
    return [*others, _constants_of(table, rows)] if rows else others


def _constants_of(table: BacktestTable, rows: Sequence[PublishedStep]) -> Fitted:
    return Fitted(
        table=table.name,
        software=table.software,
        device=platform_of(rows[0]).name,
        rows=len(rows),
        world=max(row.layout.world_size for row in rows),
        values={name: round(value, 4) for name, value in fitted(table, rows).items()},
        variant=table.variant,
    )


@functools.lru_cache(maxsize=1)
def all_constants() -> tuple[Fitted, ...]:
    """Return the constants of every table, as ``perfsuite project --software`` uses them."""
    return tuple(_constants_of(table, kept(table)) for table in (*TABLES.values(), TORCHTITAN))


def _as_commanded(table: BacktestTable, own: Sequence[PublishedStep], tables: Sequence[Fitted]) -> list[Error]:
    """Predict rows by the constants that the command takes from ``tables``."""
    values = constants_for(table.software, platform_of(own[0]), tables)[0].values
    return [Error(*pair) for pair in zip(own, predict(own, table.software, values), strict=True)]


def run_other_sizes() -> tuple[Error, ...]:
    """The largest and the smallest third of each table's models, and its steps on more nodes, from the other rows.

    A user rarely projects a model between two of the table's.
    """
    errors: list[Error] = []
    for table in TABLES.values():
        rows = kept(table)
        sizes = sorted({row.architecture.parameters for row in rows})
        third = max(1, len(sizes) // 3)
        parts = [set(sizes[:third]), set(sizes[-third:])] if len(sizes) > 2 else []
        apart = [[row for row in rows if row.architecture.parameters in part] for part in parts]
        least = min(row.layout.world_size for row in rows)
        apart.append([row for row in rows if row.layout.world_size > max(least, row.devices_per_node)])
        for own in apart:
            others = [row for row in rows if row not in own]
            if own and others:
                errors += _as_commanded(table, own, _without(table, others))
    return tuple(errors)


def run_held_out() -> tuple[Error, ...]:
    """Steps of other releases and of models in no fit: ``--software NAME`` cannot know the user's release."""
    constants = all_constants()
    tables = [table for table in TABLES.values() if table.held_out]
    return tuple(error for table in tables for error in _as_commanded(table, held_out(table), constants))


def run_experts() -> tuple[Error, ...]:
    """Steps of a model with experts by NeMo's constants, which are fitted to dense models alone."""
    return tuple(_as_commanded(TABLES["nemo-h100"], published_steps("nemo-h100-experts"), all_constants()))


def shipped_constants() -> tuple[Fitted, ...]:
    """Return the constants with a sentence about the steps of later releases, for ``perfsuite project``."""
    errors = run_held_out()
    shipped = []
    for one in all_constants():
        if one.variant:
            away = sorted(error.row.step_time_s / error.predicted_s for error in run_torchtitan())
            text = (
                f"their device is an {one.variant}; {len(away)} public steps on a100 and h200 took {away[0]:.2f} to "
                f"{away[-1]:.2f} times the projected time, median {statistics.median(away):.2f}"
            )
            shipped.append(dataclasses.replace(one, release=TORCHTITAN.release, later=text))
            continue
        table = TABLES[one.table]
        newest = table.release.split()[-1]
        own = {row.id for row in held_out(table) if row.release > newest}
        later = [error for error in errors if error.row.id in own]
        text = "no later release is in the public tables that were read"
        if later:
            ratios = sorted(error.row.step_time_s / error.predicted_s for error in later)
            first, last = (choose(error.row.release for error in later) for choose in (min, max))
            text = (
                f"{len(later)} public steps of {first if first == last else f'{first} to {last}'} on {one.device} took "
                f"{ratios[0]:.2f} to {ratios[-1]:.2f} times the projected time, median {statistics.median(ratios):.2f}"
            )
        shipped.append(dataclasses.replace(one, release=table.release, later=text))
    return tuple(shipped)


def run_other_device() -> tuple[Error, ...]:
    """Every table of llm-foundry, the one software with tables of several devices, by all tables but itself."""
    tables = [table for table in TABLES.values() if table.software == "llm-foundry"]
    return tuple(error for table in tables for error in _as_commanded(table, kept(table), _without(table)))


def run_torchtitan() -> tuple[Error, ...]:
    """Steps of torchtitan on H200 and A100, which no constant is fitted to, as the command projects them."""
    rows = [*held_out(TORCHTITAN), *(row for row in published_steps("other-programs") if "torchtitan" in row.id)]
    return tuple(error for row in rows for error in _as_commanded(TORCHTITAN, [row], all_constants()))


def run_torchtitan_others() -> tuple[Error, ...]:
    """Steps on the H100 of torchtitan's table that are in no fit: another size, AsyncTP, no torch.compile."""
    rows, values = published_steps("torchtitan-h100-96-others"), fitted(TORCHTITAN, kept(TORCHTITAN))
    return tuple(map(Error, rows, predict(rows, TORCHTITAN.software, values)))


def run_own_modules() -> tuple[Error, ...]:
    """Every row by its platform's row and perfsuite's own modules, as the command projects it without --software."""
    rows = [row for table in TABLES.values() for row in (*kept(table), *held_out(table))]
    rows += [row for file in ("other-programs", "nemo-h100-experts") for row in published_steps(file)]
    rows += [row for row in published_steps("simumax-b200") if row.architecture.experts]
    return tuple(Error(row, own_step(row)) for row in rows)


def run_software() -> tuple[Backtested, ...]:
    """Return the errors of the command: software with other sizes, software on another device, no software."""
    own: list[list[Error]] = [[], []]
    for error in run_own_modules():
        own[bool(error.row.architecture.experts)].append(error)
    return tuple(
        Backtested(name=name, title=title, errors=tuple(errors), left_out={}, constants={}, budget=budget)
        for name, title, errors, budget in (
            ("software: other sizes", "constants fitted to other sizes", run_other_sizes(), (4.0, 10.0, 25.0)),
            ("software: another device", "constants of another device", run_other_device(), (7.0, 20.0, 40.0)),
            ("software: torchtitan", "torchtitan on H200 and A100", run_torchtitan(), (7.0, 20.0, 40.0)),
            ("torchtitan's own H100", "its other steps there", run_torchtitan_others(), (12.0, 20.0, 25.0)),
            ("software: experts", "constants of dense models", run_experts(), (30.0, 60.0, 60.0)),
            ("no software", "platform's row, perfsuite's own modules", own[0], (20.0, 35.0, 60.0)),
            ("no software: experts", "the same for models with experts", own[1], (40.0, 100.0, 135.0)),
        )
    )


def bands() -> dict[str, dict[str, float | str]]:
    """10th and 90th percentile of measured over predicted, by regime, and by device and dtype where rows are enough."""
    kernels, dense, of_experts = run_kernels()
    situ = [error for table in TABLES.values() for error in run(table).errors]
    unseen, elsewhere, own = run_held_out(), run_other_device(), run_own_modules()
    sizes, away = (*run_other_sizes(), *unseen), "software, another device"
    found: dict[str, tuple[Sequence[Error | MemoryRow], str]] = {
        "in situ": ([*situ, *dense.errors, *of_experts.errors], "leave one model out; B200 by kernels and one step"),
        "kernels only": (kernels.errors, "B200 by its kernels alone"),
        "software and device": (sizes, "other sizes, more nodes and other releases than the constants were fitted to"),
        away: (elsewhere, "llm-foundry by its constants of other devices"),
        "platform row only": (own, "all tables by their platforms' rows and perfsuite's modules"),
    }
    programs = {row.id: table.software for table in TABLES.values() for row in (*kept(table), *held_out(table))}
    for regime, errors in (("software and device", sizes), (away, elsewhere), ("platform row only", own)):
        parts: dict[str, list[Error]] = {}
        for error in errors:
            row = error.row
            nodes = -(-row.layout.world_size // row.devices_per_node)
            program = "" if regime == "platform row only" else programs[row.id]
            kinds = kinds_of(nodes, platform_of(row).name, row.dtype, program, row.architecture.experts)
            for kind in kinds[:2] if regime == away else kinds:  # away, all rows are of one software
                parts.setdefault(kind, []).append(error)
        for kind, part in parts.items():
            names = {programs.get(error.row.id, error.row.id.partition("/")[0]) for error in part}
            alone = f", steps of {names.pop()} alone" if regime == "platform row only" and len(names) == 1 else ""
            if len(part) >= FEWEST_ROWS:
                found[f"{regime}, {kind}"] = part, f"{found[regime][1]}, {kind}{alone}"
    stored: dict[str, dict[str, float | str]] = {}
    for regime, (rows, tables) in found.items():
        low, high = tenths(rows)
        stored[regime] = {"low": round(low, 3), "high": round(high, 3), "rows": len(rows), "tables": tables}
    # The constants are of another device and another release here, so the wider of the two bands counts.
    stored[away] = _wider(elsewhere, unseen, f"{found[away][1]}, and other releases on the same device")
    # One software has steps of experts: elsewhere its band is not enough alone.
    plain, experts = [error for error in own if error.row.architecture.experts], run_experts()
    for regime in ("software and device", away):
        tables = "models with experts, by constants of dense models and by their platforms' rows"
        stored[f"{regime}, experts"] = _wider(experts, plain, tables)
    tables = "models with experts, by constants of dense models"
    stored["software and device, nemo with experts"] = _wider(experts, experts, tables)
    return stored


def _wider(first: Sequence[Error], second: Sequence[Error], tables: str) -> dict[str, float | str]:
    """Return the band that contains the bands of two back-tests."""
    lows, highs = zip(tenths(first), tenths(second), strict=True)
    rows = len({error.row.id for error in (*first, *second)})
    return {"low": round(min(lows), 3), "high": round(max(highs), 3), "rows": rows, "tables": tables}


def tenths(errors: Sequence[Error | MemoryRow]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile of measured over predicted.

    n rows of one model, device and dtype weigh as much as the root of n rows of different models: the same step on
    twice the devices repeats the error of the first one.
    """
    models = [(error.row.model, error.row.device, error.row.dtype) for error in errors]
    alike = Counter(models)
    ratios = sorted(
        (1 / (1 + error.percent / 100), alike[model] ** -0.5) for error, model in zip(errors, models, strict=True)
    )
    total = sum(weight for _, weight in ratios)
    before = [0.0, *itertools.accumulate(weight for _, weight in ratios)]
    places = [(start + weight / 2) / total for start, (_, weight) in zip(before, ratios, strict=False)]
    low, high = np.interp([0.1, 0.9], places, [ratio for ratio, _ in ratios])
    return float(low), float(high)


def find_tables(names: Sequence[str]) -> list[str]:
    """The names that were asked for, all where none was; ConfigurationError names the nearest."""
    every = list(NAMES)
    for name in names:
        if name not in every:
            raise ConfigurationError(f"back-test {name!r} is unknown; {did_you_mean(name, every)}")
    return list(names) or every


EXTRA = ("b200", "one-device", "one-node", "platform-row", "software", "memory", "advisor")
"""Back-tests that do not leave out one model."""
NAMES = (*TABLES, *EXTRA)
