"""Runs and pages for tests of the page, without a renderer that takes a second to start."""

from __future__ import annotations

import dataclasses
import html.parser

from perfsuite.platforms import load_catalog
from perfsuite.record.result import Metric, Peak, Work
from perfsuite.reports.material import material_of
from perfsuite.reports.page import page
from perfsuite.reports.stored import Recording
from perfsuite.schedules import make_schedule
from test_correctness.helpers import runs
from test_correctness.helpers.measurements import result_of
from test_correctness.helpers.pipelines import measured as timeline_of
from test_correctness.helpers.report_runs import gpt, llama, measurement, opensora

LINK = Peak(value=240.0, unit="GB/s", source="data sheet")


def metric(name, value, unit, **changes):
    return Metric(name=name, value=value, unit=unit, better="higher", **changes)


def on_a100(case, seen, **fields):
    seen = dataclasses.replace(seen, aligned=True, spans=())
    return result_of(seen, f"test_perf/{case}", platform="a100", fingerprint="a100-test", **fields)


def product(side, dtype, tflops, kind="published"):
    peak = Peak(value=100.0, unit="TFLOPS", source="data sheet", kind=kind)
    return on_a100(
        f"test_matmul.py::test_matmul[a100-{side}-{dtype}]",
        measurement(1, 2.0 * side**3 / tflops / 1e12),
        workload="perfsuite.workloads.matmul:Matmul",
        parameters={"m": side, "k": side, "n": side, "dtype": dtype},
        work=Work(flops={"exact": 2.0 * side**3}, dtype=dtype),
        metrics=(metric("tflops", tflops, "TFLOPS", peak=peak),),
    )


def reduced(ranks, size, time_s):
    bus = 2 * (ranks - 1) / ranks * size / time_s / 1e9
    return on_a100(
        f"test_collectives.py::test_all_reduce[a100-ws{ranks}-{size}-fp32]",
        measurement(ranks, time_s),
        workload="perfsuite.workloads.collective:AllReduce",
        parameters={"message_bytes": size, "dtype": "fp32"},
        work=Work(collective="all_reduce", message_bytes=float(size), dtype="fp32"),
        metrics=(
            metric("algbw_gb_per_s", size / time_s / 1e9, "GB/s"),
            metric("busbw_gb_per_s", bus, "GB/s", peak=LINK),
        ),
    )


def piped(schedule="1f1b"):
    found = timeline_of(make_schedule(schedule, ranks=4, num_micro_batches=4))
    plain = gpt(f"test_schedules[a100-ws4-{schedule}]", 4, 1.0, measured={"timeline": found})
    bubbles = (("bubble_ratio", 0.4), ("simulated_bubble_ratio", 0.3), ("balanced_bubble_ratio", 0.2))
    return dataclasses.replace(plain, metrics=(*plain.metrics, *(metric(*each, "ratio") for each in bubbles)))


def everything():
    """Results for every section."""
    exposed = (("exposed_communication_percent", 12.0),)
    options = ({"compression": "none"}, {"compression": "bf16"})
    return [
        *(product(side, dtype, 50.0) for side in (256, 1024) for dtype in ("fp32", "bf16")),
        *(reduced(ranks, size, 1e-5 + size / 5e10) for ranks in (2, 8) for size in (1024, 1 << 20, 1 << 24)),
        *(gpt("test_ddp", ranks, 1.0 + ranks / 50, records=exposed) for ranks in (1, 2, 4)),
        *(gpt(f"test_compression[a100-ws2-gpt2-xl-{way['compression']}]", 2, 1.0, options=way) for way in options),
        opensora(2, 1.0, platform="a100"),
        llama(8, 2.0, platform="a100"),
        piped(),
    ]


def record(*results, **meaning):
    platform = results[0].platform if results else "a100"
    name, fingerprint = "/home/somebody/journal.jsonl", f"{platform}-test"
    usual = {"name": name, "platform": platform, "fingerprint": fingerprint, "versions": {}}
    return runs.record(*results, **{**usual, **meaning})


def material(*results, base=None, **meaning):
    device = load_catalog().models.get("a100")
    runs = [Recording(run=record(*results, **meaning), device=device)]
    return material_of(runs, Recording(run=base, device=device) if base is not None else None)


def drawn(spec, name, prefix):
    """In place of the renderer."""
    return f'<svg role="img" aria-label="chart" class="{prefix}"></svg>'


def rendered(monkeypatch, *results, draw=drawn, **meaning):
    monkeypatch.setattr(page, "renderer", lambda: draw)
    return page.render(material(*results, **meaning))


def many(count):
    """So many products; every hundredth ran out of memory."""
    first = product(256, "fp32", 50.0)
    cases = [dataclasses.replace(first, case=f"t.py::test_matmul[a100-{place}]") for place in range(count)]
    full = {"outcome": "out_of_memory", "measurement": None, "metrics": (), "detail": "OOM at 1 GiB of 2"}
    return [dataclasses.replace(one, **full) if place % 100 == 99 else one for place, one in enumerate(cases)]


class Read(html.parser.HTMLParser):
    """What a browser would make of the page: tags with attributes, and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.texts = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def ids(self):
        return [found["id"] for _, found in self.tags if "id" in found]
