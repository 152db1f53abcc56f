"""SuperBench: results-summary.json(l) of nodes, and baseline.json, the mean of many.  The files have no units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfsuite.base.units import plural
from perfsuite.imports.factors import collective_named
from perfsuite.imports.row import Format, Imported, ImportedRow, Meaning, Refused, Source

_KEY = re.compile(r"^(?P<benchmark>[\w.-]+(?:/[\w.-]+)*)/(?P<metric>[^/:]+)(?::(?P<rank>\d+))?$")
_NCCL = re.compile(r"^(?P<collective>[a-z_]+)_(?P<size>\d+)_(?P<what>busbw|algbw|time)$")
_KIND = re.compile(r"(?<=/)(steptime|throughput)_|(?<=\d)_(busbw|algbw|time)$")
"""What tells figures of one run apart, of which the name is that of the run."""
_CODE = "/return_code"
_KNOWN_BENCHMARKS = re.compile(r"^(gemm-flops|nccl-bw|rccl-bw|mem-bw|kernel-launch|ib-loopback|\w+_models/)")
_UNITS: tuple[tuple[str, Meaning], ...] = (
    (r"gemm-flops/.*(flops|FP\d+|TC)$", ("flops_gflops", "GFLOPS", "higher")),
    (r"gemm-flops/.*iops$", ("ops_gops", "GOPS", "higher")),
    (r"(mem-bw|gpu-sm-copy-bw|gpu-copy-bw)/", ("bandwidth_gb_per_s", "GB/s", "higher")),
    (r"ib-loopback/ib_\w+_bw$", ("bandwidth_gb_per_s", "GB/s", "higher")),
    (r"kernel-launch/", ("time_ms", "ms", "lower")),
    (r"_models/.*/steptime_", ("step_time_ms", "ms", "lower")),
    (r"_models/.*/throughput_", ("samples_per_s", "samples/s", "higher")),
    (r"pytorch-(sharding-)?matmul/", ("time_ms", "ms", "lower")),
    (r"pytorch-computation-communication-overlap/", ("time_ms", "ms", "lower")),
)
"""Meaning of a key.  Source: superbenchmark, docs/user-tutorial/benchmarks/micro-benchmarks.md, 700d650."""
_OVER_NCCL: Mapping[str, Meaning] = {
    "busbw": ("busbw_gb_per_s", "GB/s", "higher"),
    "algbw": ("algbw_gb_per_s", "GB/s", "higher"),
    "time": ("latency_us", "us", "lower"),
}


def _documents(source: Source) -> list[tuple[int, Mapping[str, Any]]]:
    """(line, object) of each node; one without lines of its own has line 0."""
    whole = source.json
    if isinstance(whole, dict):
        return [(0, whole)]
    documents: list[tuple[int, Mapping[str, Any]]] = []
    for number, line in enumerate(source.lines, start=1):
        if line.strip():
            plain = replace(source, text=line).json
            if not isinstance(plain, dict):
                raise source.fault(
                    number, "the line is no JSON object: it was cut", "remove it, or copy the file again"
                )
            documents.append((number, plain))
    return documents


def _recognises(source: Source) -> bool:
    first = source.json if isinstance(source.json, dict) else None
    if first is None and source.lines and source.lines[0].startswith("{"):
        first = replace(source, text=source.lines[0]).json
    return isinstance(first, dict) and any(_KNOWN_BENCHMARKS.match(key) for key in first)


def _read(source: Source) -> Imported:
    rows: list[ImportedRow] = []
    refused: list[Refused] = []
    documents = _documents(source)
    for number, document in documents:
        node = str(document.get("node", ""))
        failed = {key.removesuffix(_CODE): value for key, value in document.items() if key.endswith(_CODE) and value}
        for benchmark, code in failed.items():
            line = number or source.line_of(f'"{benchmark}{_CODE}"')
            refused.append(Refused(line=line, text=_of(benchmark, node), why=_why(code)))
        for key, value in document.items():
            match = _KEY.match(key)
            line = number or source.line_of(f'"{key}"')
            if key == "node" or value is None or key.endswith(_CODE):
                continue
            code = next((code for benchmark, code in failed.items() if key.startswith(f"{benchmark}/")), None)
            if code is not None:
                refused.append(Refused(line=line, text=_of(key, node), why=_why(code)))
            elif match and (meaning := _meaning(f"{match['benchmark']}/{match['metric']}")):
                rows.append(_row(source, line, match, value, meaning, node=node))
            else:
                why = "its unit is not in the file and is not known for this benchmark"
                refused.append(Refused(line=line, text=key, why=why))
    if not rows:
        raise source.fault(1, "no figure whose unit is known", "give a results-summary.json or baseline.json")
    is_mean = len(documents) == 1 and not any(":" in key for key in documents[0][1]) and not documents[0][1].get("node")
    mean = "no ranks and no node: a mean over many machines, not a run"
    note = mean if is_mean else plural(len(documents), "node")
    return source.imported(rows, refused=refused, notes=[note])


def _of(key: str, node: str) -> str:
    return f"{key} on {node}" if node else key


def _why(code: object) -> str:
    return f"the benchmark's return code is {code!r:.20}: it failed; run it again"


def _meaning(key: str) -> Meaning | None:
    nccl = _NCCL.match(key.partition("/")[2]) if key.startswith(("nccl-bw", "rccl-bw")) else None
    if nccl:
        return _OVER_NCCL[nccl["what"]]
    return next((meaning for pattern, meaning in _UNITS if re.search(pattern, key)), None)


def _row(source: Source, line: int, match: re.Match[str], value: object, meaning: Meaning, *, node: str) -> ImportedRow:
    nccl = _NCCL.match(match["metric"])
    collective = collective_named(nccl["collective"]) if nccl else ""
    settings = {"node": node, "rank": match["rank"]}
    return source.row(
        line,
        _of(_KIND.sub("", f"{match['benchmark']}/{match['metric']}"), node),
        meaning,
        source.number(line, value, match["metric"]),
        printed=str(value),
        convention="superbench; the unit is that of its documentation",
        collective=collective,
        message_bytes=float(nccl["size"]) if nccl and collective else None,
        settings={name: text for name, text in settings.items() if text},
    )


FORMAT = Format(
    name="superbench",
    about="SuperBench results-summary.json(l) and baseline.json",
    recognises=_recognises,
    read=_read,
)
