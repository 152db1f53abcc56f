"""SuperBench: results-summary.json(l) of nodes, and baseline.json, the mean of many. The files have no units."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfsuite.base.units import plural
from perfsuite.imports.nccl_table import collective_named
from perfsuite.imports.row import Format, Imported, ImportedRow, LogFigures, Meaning, Refused, Source

_KEY = re.compile(r"^(?P<benchmark>[^/\s]+(?:/[^/\s]+)*)/(?P<metric>[^/\s]+?)(?::(?P<rank>\d{1,7}))?$")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:')
_ENTRY = re.compile(r'^\s*"(?P<key>[^"\\]+)"\s*:\s*(?P<value>-?\d[\d.eE+-]*|null|"[^"\\]*")\s*(?P<end>,?)\s*$')
_DIAGNOSIS = re.compile(r'"(diagnosis/\w+|Defective Details|Issue Details|Number Of Issues)"\s*:')
"""Keys of `sb result diagnosis`."""
_ANNOTATION = re.compile(r"^([^/:]+):[^/]*")
_RUN = re.compile(r"/\d+(?=/)")
_NCCL = re.compile(r"^(?P<collective>[a-z_]+)_(?P<size>\d+)_(?P<what>busbw|algbw|time)$")
_KIND = re.compile(r"(?<=/)(steptime|throughput)_|_(step_time|throughput)(?=$|_\d)|(?<=\d)_(busbw|algbw|time)$")
"""The part of a key that differs between figures of one run."""
_KNOWN_BENCHMARKS = re.compile(
    r'"(gemm-flops|nccl-bw|rccl-bw|mem-bw|kernel-launch|ib-(loopback|traffic|validation)|gpu-(sm-)?copy-bw|gpu-stream'
    r"|nvbandwidth|cu(blas|dnn)-function|(cublaslt|hipblaslt)-gemm|(tensorrt|ort)-inference|\w+_models|model-benchmarks"
    r'|pytorch-(matmul|sharding-matmul|computation-communication-overlap|dist-inference))(:[^"/]*)?/[^"]*"\s*:'
)
_OF_EVERY_RANK = re.compile(r"^(kernel-launch|mem-bw|gemm-flops)\b")
"""Benchmarks that run on every rank of a node: figures without ranks are means."""

_GB_PER_S: Meaning = ("bandwidth_gb_per_s", "GB/s", "higher")
_MS: Meaning = ("time_ms", "ms", "lower")
_US: Meaning = ("time_us", "us", "lower")
_STEP: Meaning = ("step_time_ms", "ms", "lower")
_PER_GPU: Meaning = ("samples_per_s_per_device", "samples/s", "higher")
_OF_ONE = "; samples of one GPU: its batch over its step time"
_UNITS: tuple[tuple[str, Meaning, str], ...] = (
    (r"gemm-flops/\w*(flops|FP\d+|TC)$", ("flops_gflops", "GFLOPS", "higher"), ""),
    (r"gemm-flops/\w*iops$", ("ops_gops", "GOPS", "higher"), ""),
    (r"(cublaslt|hipblaslt)-gemm/\w+_flops$", ("tflops_per_device", "TFLOPS", "higher"), ""),
    (r"(cublas|cudnn)-function/.*_time$", _US, ""),
    (r"(tensorrt|ort)-inference/.*_time(_mean|_[\d.]+)?$", _MS, ""),
    (r"mem-bw/([hd]2[hd]_bw|[HD]2[HD]_Mem_BW)$", _GB_PER_S, ""),
    (r"gpu-sm-copy-bw/(dtoh|htod)$", _GB_PER_S, ""),
    (r"gpu-copy-bw/\w+_bw$", _GB_PER_S, ""),
    (r"gpu-stream/STREAM_\w+_bw$", _GB_PER_S, ""),
    (r"ib-loopback/ib_(write|read|send)(_\d+_ib\d+_bw|_bw_\d+)$", _GB_PER_S, ""),
    (r"ib-(traffic|validation)/ib_(write|read|send)(_bw_[\w:]+|_[\w:]+_bw)$", _GB_PER_S, ""),
    (r"ib-(traffic|validation)/ib_(write|read|send)(_lat_[\w:]+|_[\w:]+_lat)$", _US, ""),
    (r"nvbandwidth/\w+_bw$", _GB_PER_S, ""),
    (r"kernel-launch/(event|wall)_(time|overhead)$", _MS, ""),
    (r"cpu-stream/\w+_throughput$", ("bandwidth_mb_per_s", "MB/s", "higher"), ""),
    (r"disk-benchmark/\w+_iops$", ("iops", "IOPS", "higher"), ""),
    (r"disk-benchmark/\w+_lat_ns_[\d.]+$", ("latency_ns", "ns", "lower"), ""),
    (r"tcp-connectivity/.*_time_(min|max|avg)$", _MS, ""),
    (r"megatron-gpt/\w+_step_time$", _STEP, ""),
    (r"megatron-gpt/\w+_throughput$", ("samples_per_s", "samples/s", "higher"), "; of all GPUs: global batch"),
    (r"megatron-gpt/\w+_tflops$", ("tflops_per_device", "TFLOPS", "higher"), ""),
    (r"(_models|model-benchmarks)/.*/(steptime_\w+|\w+_step_time(_[\d.]+)?)$", _STEP, ""),
    (r"(_models|model-benchmarks)/.*/(throughput_\w+|\w+_throughput(_[\d.]+)?)$", _PER_GPU, _OF_ONE),
    (r"pytorch-matmul/nosharding(_time)?$", _MS, ""),
    (r"pytorch-sharding-matmul/all(reduce|gather)(_time)?$", _MS, ""),
    (r"pytorch-computation-communication-overlap/(mat)?mul_(time|cost)$", _MS, ""),
    (r"pytorch-dist-inference/step_times(_[\d.]+)?$", _STEP, ""),
)
"""Meaning of a key without annotation, and a remark on its convention. Source: superbenchmark,
docs/user-tutorial/benchmarks, 700d650. Left out because of contradictory units: the bandwidth of cpu-memory-bw-latency
(GB/s until 0.6, MB/s later) and the latencies of nvbandwidth (ns in its output, us in the documentation)."""
_OVER_NCCL: Mapping[str, Meaning] = {
    "busbw": ("busbw_gb_per_s", "GB/s", "higher"),
    "algbw": ("algbw_gb_per_s", "GB/s", "higher"),
    "time": ("latency_us", "us", "lower"),
}
_STATUS = re.compile(
    r"(/|_)(return_code|pass|abort|correctness|error|error_rate|threads|bs|count|success_rate)$"
    r"|^gpu-burn(:[^/]*)?/time$|^monitor/"
)
"""Keys whose value is a result, a count or a setting."""
_MUST_BE: Mapping[str, int] = {"return_code": 0, "abort": 0, "pass": 1, "correctness": 1}
"""Value after a run without errors, by the last word of a status."""


@dataclass(frozen=True, kw_only=True)
class _Document:
    """The results of one node, or a mean."""

    entries: Mapping[str, tuple[int, object]]  # Line and value by key.
    node: str = ""
    run: int = 1  # Number of the document among those of one node.

    @property
    def is_ranked(self) -> bool:
        """Return whether benchmarks of every rank have one figure per rank."""
        keys = [match for key in self.entries if (match := _KEY.match(key)) and _OF_EVERY_RANK.match(key)]
        return not keys or any(match["rank"] for match in keys)

    def of(self, key: str) -> str:
        """Return the key with its node and run."""
        return "".join((key, f" on {self.node}" if self.node else "", f", run {self.run}" if self.run > 1 else ""))


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; a repeated key gets both values as a text."""
    found: dict[str, object] = {}
    for key, value in pairs:
        found[key] = value if found.get(key, value) == value else f"{found[key]} and {value}"
    return found


def _parsed(text: str) -> list[dict[str, object]]:
    """Return the objects of a JSON text, also in an array; empty for other text."""
    try:
        plain = json.loads(text, object_pairs_hook=_object, parse_constant=str)
    except (ValueError, RecursionError):
        return []
    objects = plain if isinstance(plain, list) else [plain]
    return objects if all(isinstance(each, dict) for each in objects) else []


def _documents(source: Source, kept: LogFigures) -> list[_Document]:
    """Return the objects of the file or of each line; a damaged line costs only itself."""
    if _DIAGNOSIS.search(source.text):
        reason = "a diagnosis: its values are ratios to a baseline, not measurements"
        raise source.fault(1, reason, "give results-summary.jsonl of the run")
    objects = _parsed(source.text)
    filled = [(number, line) for number, line in enumerate(source.lines, start=1) if line.strip()]
    if objects and len(filled) > 1:
        return _runs(_placed(filled, objects), kept)
    documents: list[_Document] = []
    loose: dict[str, tuple[int, object]] = {}
    for index, (number, line) in enumerate(filled):
        text = line.strip()
        after = filled[index + 1][1].strip() if index + 1 < len(filled) else ""
        objects = _parsed(text if text.startswith("[{") else line[line.find("{") :]) if "{" in line else []
        entry = _ENTRY.match(line)
        if objects and all(map(_is_whole, objects)):
            documents += [_document({key: (number, value) for key, value in each.items()}) for each in objects]
        elif entry and (entry["end"] or after.rstrip(",") == "}"):
            _add(loose, entry, number)
        elif _QUOTED.search(line):
            why = "the line is not a whole JSON object or entry: it was cut, or text was printed into it; copy it again"
            kept.refused.append(Refused(line=number, text=text[:60], why=why))
        elif text.strip("[],") in ("{", "}"):
            documents += [_document(loose)] if loose else []
            loose = {}
        elif text.strip("[],"):
            kept.left_out["line", "not JSON"] += 1
    return _runs([*documents, *([_document(loose)] if loose else [])], kept)


def _placed(filled: Sequence[tuple[int, str]], objects: Sequence[Mapping[str, object]]) -> list[_Document]:
    """Return the objects with the line of each key, in the order of the text."""
    keys = iter([(match[1], number) for number, line in filled for match in _QUOTED.finditer(line)])
    documents = []
    for each in objects:
        entries = {}
        for key, value in each.items():
            raw = json.dumps(key, ensure_ascii=False)[1:-1]
            entries[key] = (next((number for name, number in keys if name in (key, raw)), 1), value)
        documents.append(_document(entries))
    return documents


def _is_whole(plain: Mapping[str, object]) -> bool:
    """Return whether every key of a line is of SuperBench; text of another process breaks it."""
    node = plain.get("node")
    return all("/" in key or key == "node" for key in plain) and not (isinstance(node, str) and re.search(r"\s", node))


def _add(loose: dict[str, tuple[int, object]], entry: re.Match[str], number: int) -> None:
    value = json.loads(entry["value"]) if entry["value"][0] in 'n"' else entry["value"]
    before = loose.setdefault(entry["key"], (number, value))
    if before[1] != value:
        loose[entry["key"]] = (number, f"{before[1]} and {value}")


def _document(entries: dict[str, tuple[int, object]]) -> _Document:
    node = entries.pop("node", (0, ""))[1]
    return _Document(entries=entries, node=str(node or ""))


def _runs(documents: list[_Document], kept: LogFigures) -> list[_Document]:
    """Return the documents without repeated ones, and number those of one node."""
    different: list[_Document] = []
    for document in documents:
        values = {key: value for key, (_, value) in document.entries.items()}
        same = [other for other in different if other.node == document.node]
        if any(values == {key: value for key, (_, value) in other.entries.items()} for other in same):
            kept.left_out["line", "repeats another line"] += 1
        else:
            different.append(_Document(entries=document.entries, node=document.node, run=len(same) + 1))
    return different


def _read(source: Source) -> Imported:
    kept = LogFigures()
    documents = _documents(source, kept)
    for document in documents:
        _figures(source, document, kept)
    if not kept.rows and not kept.refused:
        raise source.fault(1, "no figure whose unit is known", "give a results-summary.json or baseline.json")
    notes = [
        *_machines(documents),
        *kept.counted(),
    ]
    return source.imported(kept.rows, refused=kept.refused, notes=notes)


def _machines(documents: list[_Document]) -> Iterator[str]:
    """Yield a note on the machines of the figures; a file without machines may have the mean of many."""
    if named := len({document.node for document in documents if document.node}):
        yield plural(named, "node")
    unnamed = [document for document in documents if not document.node]
    if any(not document.is_ranked for document in unnamed):
        yield "no ranks and no node: a mean over many machines, not a run"
    elif unnamed:
        yield "no node is named: one machine, or a mean over machines rank by rank"


def _figures(source: Source, document: _Document, kept: LogFigures) -> None:
    """Add the figures of a document, refuse those of failed runs, and count all other values."""
    failed = list(_failures(document))
    for prefix, rank, line, why in failed:
        where = f"{prefix.rstrip('/_')}:{rank}" if rank else prefix.rstrip("/_")
        kept.refused.append(Refused(line=line, text=document.of(where), why=why))
    for key, (line, value) in document.entries.items():
        match = _KEY.match(key)
        if value is None:
            kept.left_out["value", "empty"] += 1
        elif match and _STATUS.search(f"{match['benchmark']}/{match['metric']}"):
            kept.left_out["value", "a status, a count, a setting or of the monitor"] += 1
        elif match is None:
            kept.refused.append(Refused(line=line, text=key, why="not a key of SuperBench; remove it"))
        elif why := next((why for prefix, rank, _, why in failed if _is_of(match, prefix, rank)), ""):
            kept.refused.append(Refused(line=line, text=document.of(key), why=why))
        else:
            _figure(source, document, kept, match)


def _is_of(match: re.Match[str], prefix: str, rank: str | None) -> bool:
    """Return whether a failure concerns a figure; a failure of another rank does not."""
    return match[0].startswith(prefix) and (rank is None or match["rank"] in (None, rank))


def _failures(document: _Document) -> Iterator[tuple[str, str | None, int, str]]:
    """Yield beginning of the keys, rank (None: all), line and reason of every failed run."""
    for key, (line, value) in document.entries.items():
        match = _KEY.match(key)
        word = next((word for word in _MUST_BE if match and re.search(rf"(^|_){word}$", match["metric"])), "")
        if match is None or not word or _number(value) == _MUST_BE[word]:
            continue
        name = "return code" if word == "return_code" else match["metric"]
        why = f"the benchmark's {name} is {value!r:.20}: it failed; run it again"
        own = match["metric"].removesuffix(word) if word == "correctness" else ""
        yield f"{match['benchmark']}/{own}", match["rank"], line, why


def _figure(source: Source, document: _Document, kept: LogFigures, match: re.Match[str]) -> None:
    line, value = document.entries[match[0]]
    plain = _RUN.sub("", _ANNOTATION.sub(r"\1", f"{match['benchmark']}/{match['metric']}"))
    meaning, remark = _meaning(plain)
    why = ""
    number = _number(value)
    if meaning is None:
        why = "its unit is not in the file and is not known for this benchmark; it is not imported"
    elif number is None:
        why = f"{match['metric']} is {str(value)!r:.40}, not a finite number; run it again"
    elif number < 0:
        why = f"{match['metric']} is {value}, below 0 {meaning[1]}; run it again"
    if why or meaning is None or number is None:
        kept.refused.append(Refused(line=line, text=document.of(match[0]), why=why))
    elif number == 0:
        kept.left_out["value", "zero, so below the printed digits or not measured"] += 1
    else:
        kept.rows.append(_row(source, document, match, number, meaning=meaning, remark=remark))


def _number(value: object) -> float | None:
    """Return a finite number, also from a text; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def _meaning(key: str) -> tuple[Meaning | None, str]:
    """Return the meaning of a key without annotation (None for an unknown unit), and a remark on its convention."""
    nccl = _NCCL.match(key.partition("/")[2]) if key.startswith(("nccl-bw/", "rccl-bw/")) else None
    if nccl:
        return _OVER_NCCL[nccl["what"]], ""
    found = ((meaning, remark) for pattern, meaning, remark in _UNITS if re.search(pattern, key))
    return next(found, (None, ""))


def _row(
    source: Source, document: _Document, match: re.Match[str], number: float, *, meaning: Meaning, remark: str
) -> ImportedRow:
    line, value = document.entries[match[0]]
    nccl = _NCCL.match(match["metric"])
    collective = collective_named(nccl["collective"]) if nccl else ""
    place = "copy" if match["benchmark"] == "gpu-sm-copy-bw" else "rank"
    settings = {"node": document.node, place: match["rank"], "run": str(document.run) if document.run > 1 else ""}
    return source.row(
        line,
        document.of(_KIND.sub("", f"{match['benchmark']}/{match['metric']}")),
        meaning,
        number,
        printed=str(value),
        convention=f"superbench; the unit is from its documentation{remark}",
        collective=collective,
        message_bytes=float(nccl["size"]) if nccl and collective else None,
        settings={name: text for name, text in settings.items() if text},
    )


FORMAT = Format(
    name="superbench",
    about="SuperBench results-summary.json(l) and baseline.json",
    recognises=lambda source: bool(_KNOWN_BENCHMARKS.search(source.text)),
    read=_read,
)
