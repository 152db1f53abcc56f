"""Results of a journal, decoded as far as they are asked for: samples and timelines are nine tenths of a journal."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from perfsuite.decoding import from_json
from perfsuite.errors import JournalError
from perfsuite.metrics import rederived
from perfsuite.records import ABOVE_MEASURED_PEAK, Lateness, Measurement, Metric, Peaks, Result

_START = b',"measurement":{"samples":['
_END = b'},"fingerprint":"'
_RANKS, _ARRIVAL = b',"ranks":', ',"arrival":'
_DECODER = json.JSONDecoder()
_TIME = re.compile(rb'\{"time_s":([-+.\de]+)[,}]')


class JournaledResult(Result):
    """A result whose metrics and measurement are decoded when they are first asked for.

    Where they are damaged, that raises JournalError naming the line.
    """

    _plain_metrics: Any
    _measurement_json: bytes
    _peaks: Peaks | None
    _damage: Callable[[str], JournalError]

    @functools.cached_property
    def metrics(self) -> tuple[Metric, ...]:  # a field there, made late here
        """As shares of the peaks that the journal ends with."""
        try:
            metrics = tuple(from_json(Metric, plain) for plain in self._plain_metrics)
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

    @functools.cached_property
    def values(self) -> Mapping[str, float]:
        """As they were written; a utilisation of a measured peak as one of the peak that the journal ends with."""
        if "metrics" in vars(self):
            return {metric.name: metric.value for metric in self.metrics if metric.value is not None}
        values: dict[str, float] = {}
        for plain in self._plain_metrics:
            value, peak = plain.get("value"), plain.get("peak")
            if value is not None and peak and plain.get("unit") == "percent" and peak.get("kind") == "measured":
                last = self._peaks.tflops.get(self.work.dtype) if self._peaks is not None else None
                value *= peak["value"] / last.value if last is not None else 1.0
                if value > 100:
                    continue  # what is above a measured peak is no share of it
            if value is not None:
                values[plain["name"]] = value
        return values

    @property
    def above_peak(self) -> tuple[Metric, ...]:
        """Metrics are decoded only where one, as it was written, may be above its peak."""
        if "metrics" not in vars(self) and not any(map(self._may_exceed, self._plain_metrics)):
            return ()
        return super().above_peak

    def _may_exceed(self, plain: Mapping[str, Any]) -> bool:
        """Whether a metric is above the measured peak that it was written with or the last one of its kind."""
        peak, value = plain.get("peak"), plain.get("value")
        if not peak or peak.get("kind") != "measured":
            return False
        if value is None:
            return plain.get("note") == ABOVE_MEASURED_PEAK
        last = None
        if self._peaks is not None:
            of_memory = peak.get("unit") == "GB/s"
            last = self._peaks.memory_bandwidth if of_memory else self._peaks.tflops.get(self.work.dtype)
        rate = value / 100 * peak["value"] if plain.get("unit") == "percent" else value
        return bool(rate > min(peak["value"], last.value if last is not None else peak["value"]))

    @functools.cached_property
    def measurement(self) -> Measurement | None:
        """None when the case ran out of memory."""
        try:
            return from_json(Measurement, json.loads(self._measurement_json))
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

    @property
    def lateness(self) -> Lateness | None:
        """Read off what the ranks said of themselves; samples and timelines stay as they are."""
        known = "measurement" not in vars(self) and _lateness(self._measurement_json)
        return known or super().lateness

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Result):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in dataclasses.fields(Result))

    __hash__ = None  # type: ignore[assignment]  # it holds mappings


def _lateness(measurement_json: bytes) -> Lateness | None:
    """None where it is not written as perfsuite writes it."""
    start = measurement_json.find(_RANKS, measurement_json.find(b"]"))
    if start < 0:
        return None
    try:
        text = measurement_json[start + len(_RANKS) :].decode()
        ranks, end = _DECODER.raw_decode(text)
        at = text.find(_ARRIVAL, end)
        arrival = _DECODER.raw_decode(text, at + len(_ARRIVAL))[0] if at >= 0 else None
        told = sorted((rank["rank"], rank["host"], rank["device"], float(rank["median_s"])) for rank in ranks)
        late = (int(arrival["late_rank"]), float(arrival["lag_s"])) if arrival is not None else None
    except (ValueError, KeyError, TypeError):
        return None
    return Lateness(ranks=tuple(rank[1:] for rank in told), arrival=late)


def split_result(line: bytes) -> tuple[bytes, bytes]:
    """A result's line without its measurement, and the measurement; the whole line and nothing where it has none.

    Keys of a case's parameters may be called anything: they stand before the measurement, nothing so called after it.
    """
    start, end = line.rfind(_START), line.rfind(_END)
    if start < 0 or end < start:
        return line, b""
    return line[:start] + line[end + 1 :], line[start + len(b',"measurement":') : end + 1]


def late_result(
    plain: Mapping[str, Any],
    measurement_json: bytes,
    environment: Mapping[str, Any],
    damage: Callable[[str], Exception],
) -> JournaledResult:
    """The result that ``plain`` stands for but for its measurement; ValueError where it is damaged."""
    early = {name: value for name, value in plain.items() if name != "metrics"}
    result = from_json(JournaledResult, early)
    fields = vars(result)  # what is absent there is made by the properties above
    del fields["metrics"], fields["measurement"]
    fields.update(
        environment=environment,
        _plain_metrics=plain.get("metrics", ()),
        _measurement_json=measurement_json,
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
