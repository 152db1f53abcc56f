"""Results of a journal, decoded as far as they are asked for: samples and timelines are nine tenths of a journal."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perfsuite.base.errors import JournalError
from perfsuite.metrics import rederived
from perfsuite.record.codec import from_json, plain_json
from perfsuite.record.result import ABOVE_MEASURED_PEAK, Measurement, Metric, Peak, Peaks, Result
from perfsuite.record.step import Lateness

_METRICS = b',"metrics":['
_START = b',"measurement":{"samples":['
_END = b'},"fingerprint":"'
_RANKS, _AFTER_RANKS, _ARRIVAL = b',"ranks":[', b'],"backend":"', b',"arrival":'
_EACH_RANK = b'{"rank":'
_IMPORTS = b'"imports":{'
_INSTRUMENTS = b'"instruments":["'
_RANK = re.compile(rb'\{"rank":(\d+),"host":"([^"\\]*)","device":"([^"\\]*)",[^{}]*?"median_s":([-+.\de]+)[,}]')
_TIME = re.compile(rb'\{"time_s":([-+.\de]+)[,}]')


@dataclass(frozen=True, kw_only=True)
class _Glance:
    """What of the metrics is known without decoding them."""

    values: Mapping[str, float]
    with_peak: tuple[str, ...]
    """Names of those that are a share of something."""
    may_exceed: bool
    """Whether one may be above a measured peak."""


class JournaledResult(Result):
    """A result whose metrics and measurement are decoded when they are first asked for.

    Where they are damaged, that raises JournalError naming the line.
    """

    _metrics_json: bytes
    """Kept as text: as objects the metrics of 10,000 cases take 150 MB."""
    _measurement_json: bytes
    _peaks: Peaks | None
    _damage: Callable[[str], JournalError]

    @functools.cached_property
    def metrics(self) -> tuple[Metric, ...]:  # a field there, made late here
        """As shares of the peaks that the journal ends with."""
        try:
            metrics = tuple(from_json(Metric, plain) for plain in self._plain_metrics())
        except (ValueError, TypeError) as error:
            raise self._damage(str(error)) from None
        peaks = self._peaks
        known = (*peaks.tflops.values(), peaks.memory_bandwidth) if peaks is not None else ()
        moved = [
            metric for metric in metrics if metric.peak and metric.peak.kind == "measured" and metric.peak not in known
        ]
        if peaks is None or not moved or self.measurement is None:
            return metrics
        return rederived(metrics, work=self.work, measurement=self.measurement, peaks=peaks)

    def _plain_metrics(self) -> list[Any]:
        """As they were written; ValueError where that is no list of JSON objects."""
        plain = plain_json(self._metrics_json) if self._metrics_json else []
        if not all(isinstance(metric, dict) for metric in plain):
            raise ValueError("metrics hold what is no object")
        return list(plain)

    @functools.cached_property
    def values(self) -> Mapping[str, float]:
        """As they were written; a utilisation of a measured peak as one of the peak that the journal ends with."""
        if "metrics" in vars(self):
            return {metric.name: metric.value for metric in self.metrics if metric.value is not None}
        return self._glance.values

    @property
    def above_peak(self) -> tuple[Metric, ...]:
        """Metrics are decoded only where one, as it was written, may be above its peak."""
        return super().above_peak if "metrics" in vars(self) or self._glance.may_exceed else ()

    def peak(self, name: str) -> Peak | None:
        """Metrics are decoded only where this one was written with a peak."""
        return super().peak(name) if "metrics" in vars(self) or name in self._glance.with_peak else None

    @functools.cached_property
    def _glance(self) -> _Glance:
        """One look at the metrics as they were written."""
        values: dict[str, float] = {}
        with_peak: list[str] = []
        may_exceed = False
        try:
            for plain in self._plain_metrics():
                name, value, peak = plain["name"], plain.get("value"), plain.get("peak")
                if value is not None and type(value) not in (float, int):
                    raise TypeError
                if peak:
                    with_peak.append(name)
                if peak and peak.get("kind") == "measured":
                    may_exceed = may_exceed or self._may_exceed(plain)
                    if value is not None and plain["unit"] == "percent":
                        last = self._last_peak("TFLOPS")
                        value *= peak["value"] / last.value if last is not None else 1.0
                        if value > 100:
                            continue  # what is above a measured peak is no share of it
                if value is not None:
                    values[name] = value
        except (ValueError, TypeError, KeyError):
            values = dict(super().values)  # decoded to say what is damaged
        return _Glance(values=values, with_peak=tuple(with_peak), may_exceed=may_exceed)

    def _may_exceed(self, plain: Mapping[str, Any]) -> bool:
        """Whether a metric is above the measured peak that it was written with or the last one of its kind."""
        peak, value = plain["peak"], plain.get("value")
        if value is None:
            return plain.get("note") == ABOVE_MEASURED_PEAK
        last = self._last_peak(peak["unit"])
        rate = value / 100 * peak["value"] if plain["unit"] == "percent" else value
        return bool(rate > min(peak["value"], last.value if last is not None else peak["value"]))

    def _last_peak(self, unit: str) -> Peak | None:
        """What the journal ends with for a peak in this unit; None where it ends with none."""
        if self._peaks is None:
            return None
        return self._peaks.memory_bandwidth if unit == "GB/s" else self._peaks.tflops.get(self.work.dtype)

    @functools.cached_property
    def measurement(self) -> Measurement | None:
        """None when the case ran out of memory."""
        try:
            return from_json(Measurement, plain_json(self._measurement_json))
        except ValueError as error:
            raise self._damage(str(error)) from None

    @functools.cached_property
    def median_s(self) -> float:
        """Median seconds per iteration; of a measurement that nobody asked for, read off its samples alone."""
        if "measurement" in vars(self):
            return super().median_s
        samples = self._measurement_json[: self._measurement_json.index(b"]")]
        times = [float(time) for time in _TIME.findall(samples)]
        return statistics.median(times) if len(times) == samples.count(b"{") - 1 > 0 else super().median_s

    @functools.cached_property
    def lateness(self) -> Lateness | None:
        """Read off what the ranks said of themselves; samples and timelines stay as they are."""
        known = "measurement" not in vars(self) and _lateness(self._measurement_json)
        return known or super().lateness

    @property
    def foreign_imports(self) -> Mapping[str, str]:
        """The measurement is decoded only where there may be some."""
        written = b"" if "measurement" in vars(self) else self._measurement_json
        start = written.find(_IMPORTS)
        decode = not written or (start >= 0 and b'":"/' in written[start : written.find(b"}", start)])
        return super().foreign_imports if decode else {}

    @property
    def instruments(self) -> tuple[str, ...]:
        """The measurement is decoded only where there may be some."""
        known = "measurement" in vars(self) or _INSTRUMENTS in self._measurement_json
        return super().instruments if known else ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Result):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in dataclasses.fields(Result))

    __hash__ = None  # type: ignore[assignment]  # it holds mappings


def _lateness(measurement_json: bytes) -> Lateness | None:
    """None where it is not written as perfsuite writes it."""
    start = measurement_json.find(_RANKS, measurement_json.find(b"]"))
    end = measurement_json.find(_AFTER_RANKS, start)
    told = _RANK.findall(measurement_json, start, end) if 0 <= start < end else []
    if not told or len(told) != measurement_json.count(_EACH_RANK, start, end):
        return None
    at = measurement_json.find(_ARRIVAL, end)
    try:
        ranks = sorted((int(rank), host.decode(), device.decode(), float(time)) for rank, host, device, time in told)
        arrival = (
            json.loads(measurement_json[at + len(_ARRIVAL) : measurement_json.find(b"}", at) + 1]) if at > 0 else None
        )
        late = (int(arrival["late_rank"]), float(arrival["lag_s"])) if arrival is not None else None
    except (ValueError, KeyError, TypeError):
        return None
    return Lateness(ranks=tuple(rank[1:] for rank in ranks), arrival=late)


@dataclass(frozen=True, kw_only=True)
class ResultLine:
    """A result's line in the parts in which it is decoded."""

    light: bytes
    """The line without what follows."""
    metrics_json: bytes = b""
    """A list; empty where there is none, and where the line has no measurement."""
    measurement_json: bytes = b""
    """An object; empty where there is none."""


def split_result(line: bytes) -> ResultLine:
    """The parts of a line; what is no result as perfsuite writes it is light as a whole.

    Keys of a case's parameters may be called anything: they stand before the work of the case, the metrics and the
    measurement, and nothing so called after it.
    """
    start, end = line.rfind(_START), line.rfind(_END)
    if start < 0 or end < start:
        return ResultLine(light=line)
    metrics = line.rfind(_METRICS, 0, start) if line[start - 1 : start] == b"]" else -1
    before = metrics if metrics >= 0 else start
    return ResultLine(
        light=line[:before] + line[end + 1 :],
        metrics_json=line[before + len(_METRICS) - 1 : start] if metrics >= 0 else b"",
        measurement_json=line[start + len(b',"measurement":') : end + 1],
    )


def late_result(
    plain: Mapping[str, Any],
    line: ResultLine,
    environment: Mapping[str, Any],
    damage: Callable[[str], Exception],
) -> JournaledResult:
    """The result of a line whose light part is ``plain``; ValueError where that is damaged."""
    result = from_json(JournaledResult, plain)
    fields = vars(result)  # what is absent there is made by the properties above
    del fields["metrics"], fields["measurement"]
    fields.update(
        environment=environment,
        _metrics_json=line.metrics_json,
        _measurement_json=line.measurement_json,
        _peaks=None,
        _damage=damage,
    )
    return result


def share_of(result: Result, peaks: Peaks) -> Result:
    """The result with what it says of a measured peak said of ``peaks``; of a late one, when it is asked."""
    if isinstance(result, JournaledResult) and "metrics" not in vars(result):
        vars(result)["_peaks"] = peaks
        return result
    measurement = result.measurement
    if measurement is None:
        return result
    metrics = rederived(result.metrics, work=result.work, measurement=measurement, peaks=peaks)
    return dataclasses.replace(result, metrics=metrics)
