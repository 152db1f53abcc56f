"""Derive the traits of the software from its cases: steady-state block, host time, overlap, spread of ranks."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from perfsuite.base.errors import PerfsuiteError
from perfsuite.models import find
from perfsuite.platforms import DeviceModel
from perfsuite.projection.calibration import Calibration, Constant
from perfsuite.projection.device_constants import ONE_CASE, least_squares, named
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.observation import Observation
from perfsuite.projection.step import Projection, project

_NO_SLOPE = 0.01
"""Share of its kernels' time below which a block counts as not measured."""
_ODD = 2.0
"""Multiple of its kernels' time above which a block has other kernels than the measured ones."""
_ALIKE = 0.02
"""1 - squared cosine of kernel and optimizer times; below it no batch separates them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Depths:
    """Steps that differ only in the number of layers; their slope is a block in steady state."""

    steps: Mapping[int, Observation]
    """Observations by number of layers, fewest first."""

    @property
    def block_s(self) -> float:
        """Return the seconds of one more layer, by least squares."""
        return self._line.slope

    @property
    def misfit(self) -> float:
        """Return the largest relative deviation of a step from the line."""
        slope, rest = self._line
        return max(abs(seen.time_s - rest - slope * layers) / seen.time_s for layers, seen in self.steps.items())

    @property
    def _line(self) -> statistics.LinearRegression:
        return statistics.linear_regression([*self.steps], [seen.time_s for seen in self.steps.values()])


def depths_of(observations: Iterable[Observation]) -> tuple[Depths, ...]:
    """Return the series of steps on one device with two depths or more."""
    series: dict[str, dict[int, Observation]] = {}
    for seen in observations:
        training = seen.training
        if training is None or seen.world_size > 1:
            continue
        try:
            layers = find(training.model, training.overrides).layers
        except PerfsuiteError:  # a model of another perfsuite
            continue
        others = {name: value for name, value in training.overrides.items() if name != "layers"}
        key = repr(dataclasses.replace(training, overrides=dict(sorted(others.items()))))
        series.setdefault(key, {})[layers] = seen
    return tuple(Depths(steps=dict(sorted(steps.items()))) for steps in series.values() if len(steps) > 1)


def traits_of(
    observations: Sequence[Observation], device: DeviceModel, kernels: Calibration
) -> tuple[dict[str, Constant], tuple[str, ...]]:
    """Return traits by name, and the reasons why cases could not be used.

    ``kernels`` has the constants of the device.
    """
    traits: dict[str, Constant] = {}
    launches = [seen for seen in observations if seen.kind == "KernelLaunch" and seen.launch_s]
    if launches:
        launch_us = statistics.median(seen.launch_s or 0.0 for seen in launches) * 1e6
        traits["launch_us"] = Constant(value=launch_us, unit="us", source=named(launches), relative_error=ONE_CASE)
    if overlap := _overlap(observations):
        traits["overlap_ratio"] = overlap
    if spread := _rank_spread(observations):
        traits["rank_spread_ratio"] = spread
    in_situ, notes = _in_situ(depths_of(observations), device, kernels, traits)
    return {**traits, **in_situ}, notes


def _overlap(observations: Iterable[Observation]) -> Constant | None:
    """Return the hidden share of the shorter of products and message: (products + message - both) / shorter."""
    trios: dict[str, dict[str, Observation]] = {}
    for seen in observations:
        if seen.kind == "MatmulBesideAllReduce":
            others = {name: value for name, value in seen.parameters.items() if name != "part"}
            trios.setdefault(f"{seen.world_size} {sorted(others.items())}", {})[seen.parameters["part"]] = seen
    whole = [trio for trio in trios.values() if len(trio) == 3]
    if not whole:
        return None
    shares = []
    for trio in whole:
        both, products, message = (trio[part].time_s for part in ("both", "products", "message"))
        shares.append(min(1.0, max(0.0, (products + message - both) / min(products, message))))
    spread = (max(shares) - min(shares)) / 2 if len(shares) > 1 else ONE_CASE
    source = named(seen for trio in whole for seen in trio.values())
    return Constant(value=statistics.median(shares), unit="ratio", source=source, relative_error=round(spread, 4))


def _rank_spread(observations: Iterable[Observation]) -> Constant | None:
    """Return the spread of ranks in the widest case whose ranks compute the same without waiting."""
    alone = [seen for seen in observations if seen.kind in ("Matmul", "MemoryTriad") and len(seen.rank_times_s) > 1]
    if not alone:
        return None
    widest = max(alone, key=lambda seen: len(seen.rank_times_s))
    times = widest.rank_times_s
    ratio = statistics.stdev(times) / statistics.fmean(times)
    error = 1 / (2 * (len(times) - 1)) ** 0.5  # of a standard deviation from so many normal numbers
    return Constant(value=ratio, unit="ratio", source=widest.case, relative_error=round(error, 4))


def _in_situ(
    series: Sequence[Depths], device: DeviceModel, kernels: Calibration, traits: Mapping[str, Constant]
) -> tuple[dict[str, Constant], tuple[str, ...]]:
    """Return the ratio of a block to its kernels, and the rest of a step outside blocks and ends."""
    base = dataclasses.replace(kernels, traits={name: value for name, value in traits.items() if name != "host_step_s"})
    blocks: list[_Block] = []
    notes: list[str] = []
    for depths in series:
        dtype = next(seen.training.dtype for seen in depths.steps.values() if seen.training)
        names = named(depths.steps.values())
        if not base.value(f"matmul_{dtype}_tflops"):
            notes.append(f"{names}: no product in {dtype} was measured to hold them against")
            continue
        parts = [part for projection in _foreseen(depths, device, base) for part in projection.parts]
        if any(part.name == "launching kernels" and part.seconds > 0 for part in parts):
            notes.append(f"{names}: bound by the host, so they contain nothing about the device's block")
            continue
        block = _block(depths, device, base)
        if depths.block_s <= _NO_SLOPE * block.foreseen_s or block.kernels_s <= 0:
            notes.append(f"{names}: a step of more layers took no longer; measure it again")
            continue
        blocks.append(block)
    if not blocks:
        return {}, tuple(notes)
    sources = [seen for block in blocks for seen in block.depths.steps.values()]
    optimizer = _optimizer_ratio(blocks)
    ratios = [block.ratio(1.0 if optimizer is None else optimizer) for block in blocks]
    ratio = statistics.median(ratios)
    error = max((max(ratios) - min(ratios)) / 2 / ratio, *(block.depths.misfit for block in blocks))
    if not 1 / _ODD <= ratio <= _ODD:
        notes.append(
            f"{named(sources)}: a block takes {ratio:.3g} times the sum of its kernels, so they are not alike; measure "
            "kernels of the sizes that are projected (--perf-scale=full)"
        )
    fitted = {"in_situ_ratio": ratio, "optimizer_ratio": optimizer}
    in_situ = {
        name: Constant(value=value, unit="ratio", source=named(sources), relative_error=round(error, 4))
        for name, value in fitted.items()
        if value is not None
    }
    base = dataclasses.replace(base, traits={**base.traits, **in_situ})
    rests = [seen.time_s - _project(seen, device, base).step_time_s for seen in sources]
    host = Constant(value=max(0.0, statistics.median(rests)), unit="s", source=named(sources), relative_error=0.5)
    return {**in_situ, "host_step_s": host}, tuple(notes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """One more layer of a series of depths: its time, and the projected times of its parts."""

    depths: Depths
    foreseen_s: float
    """Projected time with counted kernels and optimizer."""
    kernels_s: float
    optimizer_s: float

    @property
    def rest_s(self) -> float:
        """Return the time outside kernels and optimizer."""
        return self.foreseen_s - self.kernels_s - self.optimizer_s

    def ratio(self, optimizer: float) -> float:
        """Return the ratio of its kernels, if the optimizer takes ``optimizer`` times its counted time."""
        return max(_NO_SLOPE, (self.depths.block_s - self.rest_s - optimizer * self.optimizer_s) / self.kernels_s)


def _block(depths: Depths, device: DeviceModel, base: Calibration) -> _Block:
    once, kernels, optimizer = (
        statistics.linear_regression(
            [*depths.steps], [projection.step_time_s for projection in _foreseen(depths, device, base, **tried)]
        ).slope
        for tried in ({}, {"in_situ_ratio": 2.0}, {"optimizer_ratio": 2.0})
    )
    return _Block(depths=depths, foreseen_s=once, kernels_s=kernels - once, optimizer_s=optimizer - once)


def _optimizer_ratio(blocks: Sequence[_Block]) -> float | None:
    """Fit the ratio of the optimizer from series at several batches, which have different shares of it.

    Relative errors are squared over both ratios. Returns None if the shares are equal.
    """
    rows = [
        (block.kernels_s / block_s, block.optimizer_s / block_s, 1 - block.rest_s / block_s)
        for block in blocks
        for block_s in [block.depths.block_s]
    ]
    ratios = least_squares(rows, _ALIKE)
    return ratios[1] if ratios is not None and min(ratios) > _NO_SLOPE else None


def _foreseen(depths: Depths, device: DeviceModel, base: Calibration, **tried: float) -> list[Projection]:
    """Return the projection of every depth under these traits."""
    assumed = {name: Constant(value=value, unit="ratio", source="tried") for name, value in tried.items()}
    changed = dataclasses.replace(base, traits={**base.traits, **assumed})
    return [_project(seen, device, changed) for seen in depths.steps.values()]


def _project(seen: Observation, device: DeviceModel, calibration: Calibration) -> Projection:
    assert seen.training is not None
    return project(TrainingJob.of(seen.training, device), calibration, simulated=calibration.simulated)
