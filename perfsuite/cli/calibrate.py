"""``perfsuite calibrate``: derive the constants of a projection for a device and its software from stored results."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural
from perfsuite.base.writing import make_folder
from perfsuite.baselines.baseline import Baseline, Entry
from perfsuite.cli.main import Command, json_argument, platform_file_argument, print_json, print_lines
from perfsuite.cli.show import read_results
from perfsuite.platforms import load_catalog
from perfsuite.projection.calibration import write_calibration
from perfsuite.projection.calibration_of import Calibrated, calibrate
from perfsuite.projection.observation import Observation, kind_of, software_key
from perfsuite.record.codec import to_json
from perfsuite.record.describe import instrumented_line
from perfsuite.record.run import INSTRUMENTED, RunRecord

_FOLDER = Path(".perfsuite/calibrations")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "RESULTS are journals (.perfsuite/journal-*.jsonl) or baseline files (baselines/PLATFORM/FINGERPRINT.json). "
        "Of a baseline file the newest run of each case is read."
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="read journals or baseline files")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help=f"write the calibration to FILE (default: one file per device and software in {_FOLDER})",
    )
    platform_file_argument(parser)
    json_argument(parser)


def _run(options: argparse.Namespace) -> None:
    observations = [seen for path in options.results for seen in read_observations(path)]
    made = calibrate(observations, load_catalog(options.platform_file))
    if options.out is not None and len(made) > 1:
        pairs = "; ".join(f"{one.calibration.device} under {one.calibration.software}" for one in made)
        raise ConfigurationError(
            f"-o {options.out}: the results calibrate {len(made)} pairs of device and software ({pairs}), but a file "
            "holds one pair; leave -o out, or give the results of one pair"
        )
    written = []
    for one in made:
        name = f"{one.calibration.device}-{one.calibration.software}".lower()
        path = options.out or _FOLDER / f"{re.sub(r'[^a-z0-9.]+', '-', name).strip('-')}.json"
        make_folder(path.parent)
        write_calibration(one.calibration, path)
        written.append((path, one))
    if options.json:
        print_json([{"file": str(path), **to_json(one)} for path, one in written])
    else:
        print_lines(line for path, one in written for line in _lines(path, one))


def read_observations(path: Path) -> Iterator[Observation]:
    """Yield the observations of a journal or baseline file.  Raises PerfsuiteError with line and reason if damaged."""
    results = read_results(path)
    if isinstance(results, RunRecord):
        if slowed := instrumented_line(results.results.values()):
            raise ConfigurationError(
                f"{path}: {slowed.removeprefix(INSTRUMENTED)}: their times include the tool; measure without it and "
                "give that journal"
            )
        yield from filter(None, map(Observation.of, results.results.values()))
    else:
        yield from (_of_entry(entry, results) for entry in results.entries.values() if entry.newest.quantiles_s)


def _of_entry(entry: Entry, baseline: Baseline) -> Observation:
    case, run = entry.case, entry.newest
    launch_us = run.metrics.get("launch_us")
    return Observation(
        case=case.node,
        kind=kind_of(case.workload),
        parameters=case.parameters,
        platform=baseline.hardware.platform,
        world_size=case.world_size,
        time_s=math.exp(run.location) if run.location is not None else run.quantiles_s[2],
        software=software_key(run.environment),
        simulated=baseline.hardware.simulated,
        fingerprint=baseline.hardware.fingerprint,
        launch_s=None if launch_us is None else launch_us * 1e-6,
        training=case.training,
        values=run.metrics,
    )


def _lines(path: Path, one: Calibrated) -> Iterator[str]:
    calibration = one.calibration
    simulated = ", simulated" if calibration.simulated else ""
    yield f"{calibration.device}{simulated} under {calibration.software}: {calibration.regime}"
    constants = {**calibration.constants, **calibration.traits}
    for name in sorted(set(constants) - {gap.name for gap in one.gaps}):
        constant = constants[name]
        yield (
            f"  {name:28} {constant.value:12.5g} {constant.unit:7} +-{100 * constant.relative_error:5.1f} %  "
            f"{constant.source}"
        )
    yield (
        f"  and {plural(len(calibration.kernels), 'kernel')}, "
        f"{plural(len(calibration.collectives), 'line')} of messages, from {plural(one.cases, 'case')}"
    )
    for note in one.notes:
        yield f"  note: {note}"
    if one.gaps:
        yield f"missing: {len(one.gaps)}"
    for gap in one.gaps:
        yield f"  {gap.name}: {gap.meaning}"
        yield f"    substitute: {gap.stand_in or 'none; it counts as zero'}"
        yield f"    measure it: {gap.command}"
    yield f"written: {path}"


CALIBRATE = Command(
    help="write a calibration file for projections from stored results",
    example="perfsuite calibrate .perfsuite/journal-20251121T120000.jsonl",
    arguments=_arguments,
    run=_run,
)
