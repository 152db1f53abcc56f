"""``perfsuite advise``: rank the layouts of a training step on N devices, with reasons."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from perfsuite.base.errors import ConfigurationError, InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import GIB, format_seconds, plural
from perfsuite.cli.job_checks import check_options
from perfsuite.cli.main import EXIT_FOUND, EXIT_OK, Command, platform_arguments, print_json, print_lines, screen_width
from perfsuite.cli.project import SIMULATED, base_training, job_arguments, make_job, node_of, read_platform
from perfsuite.models import counts, describe, trained_like
from perfsuite.models.decoder import Decoder
from perfsuite.projection.advisor import Advice, Candidate, advise, case_of, described, difference_error, job_of
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.calibration_of import command_for
from perfsuite.projection.softwares import OWN
from perfsuite.projection.step import project, require_figures
from perfsuite.reports.document import grouped
from perfsuite.reports.layout import lay_out

_MEASURED = 3  # Layouts whose cases are printed.


def _arguments(parser: argparse.ArgumentParser) -> None:
    platform_arguments(parser)
    job_arguments(parser)
    add = parser.add_argument_group("layouts to print").add_argument
    add("--top", type=int, default=10, metavar="N", help="print the N best layouts (default: %(default)s)")
    add(
        "--explain",
        metavar="MESH",
        help="compare this layout with the recommended one, such as dp64-tp8 (default: the next best)",
    )


def _run(options: argparse.Namespace) -> int:
    check_options(options)
    if options.world is None:
        raise ConfigurationError("--world is missing, and the layouts depend on it; add for example --world 16")
    if options.explain is not None and (size := MeshShape.parse(options.explain).world_size) != options.world:
        raise InvalidParameter(
            f"--explain={options.explain} has {size} devices, but --world is {options.world}; give a layout "
            f"of {options.world}"
        )
    device, calibration = read_platform(options)
    training = base_training(options, calibration)
    if device.memory is None:
        raise ConfigurationError(
            f"the memory size of {device.name} is unknown, so layouts that fit cannot be selected; "
            "give memory in a --platform-file"
        )
    node = node_of(options, device, options.world)
    base = make_job(options, training, device, dataclasses.replace(node, devices=node.devices or options.world))
    spread = dataclasses.replace(base, training=dataclasses.replace(training, layout=f"dp{options.world}"))
    require_figures(spread, calibration, simulated=calibration.simulated)  # of all devices, not of one
    advice = advise(
        training, base=base, calibration=calibration, world_size=options.world, global_batch=options.global_batch
    )
    if options.json:
        print_json(_plain(advice, calibration, options))
    else:
        print_lines(_lines(advice, calibration, options))
    return EXIT_OK if advice.chosen else EXIT_FOUND


def _tried(advice: Advice) -> int:
    return len(advice.ranked) + sum(advice.rejected.values())


def _lines(advice: Advice, calibration: Calibration, options: argparse.Namespace) -> Iterator[str]:
    device, dtype = advice.job.device, advice.job.training.dtype
    yield (
        f"{options.model} on {options.world} x {device.title}, {options.global_batch} samples in {dtype}: "
        f"{plural(_tried(advice), 'layout')}, {sum(advice.rejected.values())} rejected, {len(advice.ranked)} fit"
    )
    sizes = {one.layout.shape.size("tp") for one in advice.ranked}
    yield from (f"  {line}" for line in describe(advice.job.published, sizes))
    if options.software != OWN:
        yield from (f"  {text}" for text in calibration.software.split("; ", 1))
    if calibration.simulated:
        yield f"  {SIMULATED}"
    for reason, count in advice.rejected.items():
        yield f"  {count} rejected: {reason}"
    chosen = advice.chosen
    if chosen is None:
        yield from _nothing_fits(advice)
        return
    yield ""
    ties = _once(advice.ties)
    first, *simple = ties  # the simplest one is recommended
    fastest = sorted(simple, key=lambda named: named[1].step.seconds)[: options.top - 1]
    shown = sorted([first, *fastest], key=lambda named: named[1].step.seconds)
    best = advice.ranked[0].step.seconds
    rows = [
        (
            name,
            format_seconds(one.step.seconds),
            f"{100 * (one.step.seconds / best - 1):.1f}%",
            f"{one.binding} {100 * one.by_resource[one.binding] / one.step.seconds:.0f} %",
            f"{one.memory.total / GIB:.1f} GiB",
            "recommended" if one is chosen else "equal" if id(one) in advice.tied else "",
        )
        for name, one in (*shown, *_once(advice.others))[: options.top]
    ]
    yield from lay_out(("layout", "step", "slower", "waits most for", "memory", ""), rows, screen_width())
    if len(ties) > options.top:
        yield f"and {len(ties) - options.top} more that are as fast within the error"
    yield ""
    yield from _why(advice, chosen, calibration)
    if options.explain:
        yield from _explained(advice, options.explain, chosen)
    yield from _to_measure(advice, calibration)


def _once(candidates: Iterable[Candidate]) -> list[tuple[str, Candidate]]:
    """Return pairs of description and candidate; layouts that differ only in sharding and take as long are one pair."""
    alike = grouped(((dataclasses.replace(one.layout, sharding="none"), one.step.seconds), one) for one in candidates)
    return [
        (described(first.layout, [one.layout.sharding for one in (first, *rest)]), first)
        for first, *rest in alike.values()
    ]


def _why(advice: Advice, chosen: Candidate, calibration: Calibration) -> Iterator[str]:
    job = job_of(advice.job, chosen.layout)
    projection = project(job, calibration, simulated=calibration.simulated)
    yield (
        f"run {described(chosen.layout)}: {format_seconds(projection.step_time_s)}, "
        f"{format_seconds(projection.low_s)} to {format_seconds(projection.high_s)} (80 %; {projection.regime}; "
        f"{projection.band_source})"
    )
    if (several := len(_once(advice.ties))) > 1:
        yield f"simplest of {several} layouts whose times differ by less than the error"
    for other in advice.others[:1]:
        yield _against(advice, chosen, other)
    for flag in projection.flags:
        yield f"note: {flag.name}: {flag.text}"


def _against(advice: Advice, first: Candidate, second: Candidate) -> str:
    before, after = first.by_resource, second.by_resource
    changes = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {*before, *after}}
    differences = ", ".join(
        f"{name} {'+' if change > 0 else '-'}{format_seconds(abs(change))}"
        for name, change in sorted(changes.items(), key=lambda pair: -abs(pair[1]))
        if abs(change) > 0.002 * first.step.seconds
    )
    difference = second.step.seconds - first.step.seconds
    error = difference_error(first, second, advice.errors)
    return (
        f"not {described(second.layout)}: {'+' if difference >= 0 else '-'}{format_seconds(abs(difference))} "
        f"(+-{format_seconds(error)}): {differences or 'all resources alike'}"
    )


def _explained(advice: Advice, mesh: str, chosen: Candidate) -> Iterator[str]:
    shape = MeshShape.parse(mesh)
    candidates = advice.of_mesh(str(shape))
    if not candidates:
        reasons = ", ".join(advice.rejected) or "none was rejected"
        yield f"not {shape}: no layout of it is legal and fits; rules that were broken: {reasons}"
    elif str(chosen.layout) == str(shape):
        yield f"{shape} is the mesh of the recommended layout"
    else:
        yield _against(advice, chosen, candidates[0])


def _nothing_fits(advice: Advice) -> Iterator[str]:
    if advice.smallest is None:
        yield "nothing fits: up to 131072 devices, no legal layout fits the memory of its fullest rank"
        return
    world, layout, memory = advice.smallest
    yield (
        f"nothing fits on {advice.world_size} devices; the smallest number that fits is {world}: {described(layout)}, "
        f"{memory.total / GIB:.1f} GiB of the fullest rank"
    )


def _to_measure(advice: Advice, calibration: Calibration) -> Iterator[str]:
    yield ""
    trained = not isinstance(advice.job.published, Decoder) or trained_like(advice.job.published)
    cases: dict[str, None] = {}
    for case in (case_of(advice.job.training, one.layout) for one in (*advice.ties, *advice.ranked) if trained):
        if case:
            cases[case] = None
        if len(cases) == _MEASURED:
            break
    if cases:
        yield "measure the first few (from perfsuite import workloads), each in its own def test_layout(perf):"
        yield from (f"  {case}" for case in cases)
    else:
        yield f"the suite trains no case of these layouts of {advice.job.training.model}"
    missing = calibration.missing() if calibration.regime != "platform row only" else ()
    names = missing or ("matmul", "attention", "memory", "link", "network", "in_situ")
    yield "to narrow the band, measure these and run perfsuite calibrate on the journals:"
    for command in dict.fromkeys(command_for(name, advice.job.device.name) for name in names):
        yield f"  {command}"


def _plain(advice: Advice, calibration: Calibration, options: argparse.Namespace) -> dict[str, Any]:
    def candidate(one: Candidate) -> dict[str, Any]:
        return {
            "kind": "projected",
            "layout": described(one.layout),
            "mesh": str(one.layout),
            "step_time_s": one.step.seconds,
            "seconds": one.by_resource,
            "binding": one.binding,
            "memory_bytes": one.memory.total,
            "tie": id(one) in advice.tied,
            "case": case_of(advice.job.training, one.layout),
        }

    chosen = advice.chosen
    projection = (
        project(job_of(advice.job, chosen.layout), calibration, simulated=calibration.simulated) if chosen else None
    )
    return {
        "model": options.model,
        "platform": options.platform,
        **counts(advice.job.published, str(chosen.layout) if chosen else ""),
        "world_size": options.world,
        "global_batch": options.global_batch,
        "tried": _tried(advice),
        "legal": advice.legal,
        "fit": len(advice.ranked),
        "rejected": dict(advice.rejected),
        "chosen": candidate(chosen) if chosen else None,
        "band_s": [projection.low_s, projection.high_s] if projection else None,
        "regime": projection.regime if projection else calibration.regime,
        "ties": [candidate(one) for one in advice.ties],
        "ranked": [candidate(one) for one in advice.ranked[: options.top]],
        "smallest": (
            {"world_size": advice.smallest[0], "layout": described(advice.smallest[1])} if advice.smallest else None
        ),
    }


ADVISE = Command(
    help="rank every layout of a training step that fits on N devices",
    example="perfsuite advise --model llama3-8b --platform h100 --world 16 --global-batch 64",
    arguments=_arguments,
    run=_run,
    found="no layout fits",
)
