"""The JSON that nccl-tests writes with ``-J``: version 3, and whatever newer one has the same fields."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfsuite.imports.factors import collective_named
from perfsuite.imports.nccl_text import Log, LogPoint
from perfsuite.imports.row import Source
from perfsuite.masking import is_secret_name, masked

_KEPT = re.compile(r"^(NCCL|RCCL|MCCL|UCX)_\w+$|^(CUDA|MUSA|HIP)_VISIBLE_DEVICES$")
"""Variables that change what is measured; the others of the whole environment in the file are nobody's business."""

_MOST_RANKS = 1 << 20


def is_json(source: Source) -> bool:
    """Whether a file is what ``-J`` writes."""
    plain = source.json
    return isinstance(plain, dict) and {"version", "config", "results"} <= set(plain)


def read_json(source: Source) -> Log:
    """What the file says; ImportFailed with line, reason and remedy."""
    plain: dict[str, Any] = source.json
    config, results = plain["config"], plain["results"]
    try:
        of_process = [
            source.whole(source.line_of(f'"{name}"'), config[name], name, 1) for name in ("nthreads", "ngpus")
        ]
        ranks = max(1, len(config["devices"])) * math.prod(of_process)
        if ranks > _MOST_RANKS:
            raise source.fault(
                source.line_of('"config"'), f"{ranks} ranks are more than any machine has", "give the text instead"
            )
        points = tuple(_points(source, results))
        names = {str(result.get("experiment_name", "")) for result in results}
        variables = [text.partition("=") for text in plain.get("env") or () if isinstance(text, str)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise source.fault(
            1, f"version {plain['version']} lacks what is needed ({error!r:.60})", "give the text instead"
        ) from None
    if len(names) > 1:
        raise source.fault(1, f"two collectives in one file ({', '.join(sorted(names))})", "give a file for each")
    kept = {name: value for name, _, value in variables if _KEPT.match(name) and not is_secret_name(name)}
    settings = {f"environment {name}": masked(value) for name, value in kept.items()}
    if "nccl_version" in plain:
        settings["nccl_version"] = str(plain["nccl_version"])
    return Log(points=points, ranks=ranks, named=collective_named("".join(names)), settings=settings)


def _points(source: Source, results: Sequence[Mapping[str, Any]]) -> Iterator[LogPoint]:
    for index, result in enumerate(results):
        line = source.line_of('"size"', index)
        for side in ("out_of_place", "in_place"):
            values = result.get(side)
            if values is None:
                continue
            time = values["time"] if "time" in values else values["cpu_time"]
            figures = (("time", time), ("alg_bw", values["alg_bw"]), ("bus_bw", values["bus_bw"]))
            numbers = [source.number(line, value, what) for what, value in figures]
            yield LogPoint(
                line=line,
                size=source.whole(line, result["size"], "size"),
                dtype=str(result["type"]),
                reduces=str(result.get("redop", "none")).strip() not in ("", "none"),
                root=int(result["root"]) if str(result.get("root", "")).strip() else None,
                in_place=side == "in_place",
                time_us=numbers[0],
                printed=(str(time), str(values["alg_bw"]), str(values["bus_bw"])),
                wrong=str(values.get("nwrong", "N/A")),
            )
