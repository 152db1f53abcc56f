"""Published training steps that projections are tested against: one JSON file per table, each row with its source."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError, did_you_mean
from perfsuite.base.mesh import MeshShape
from perfsuite.projection.architecture import Architecture
from perfsuite.projection.implementation import Implementation
from perfsuite.projection.layout import Layout, Sharding
from perfsuite.projection.softwares import software_of

DATA = Path(__file__).with_name("data")
_SHARDING: Mapping[str, Sharding] = {
    "ddp": "none",
    "zero1": "optimizer",
    "fsdp-pure": "parameters",
    "fsdp-default": "parameters",
    "fsdp-gradients": "gradients",
}


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """One row."""

    id: str
    model: str
    architecture: Architecture
    layout: Layout
    dtype: str
    device: str
    devices_per_node: int
    network_gb_per_s: float
    step_time_s: float
    memory_gib: float | None
    memory_kind: str
    """``allocated``, as a projection counts it, or memory of the whole card; empty: no memory is published."""
    gradients_in_fp32: bool
    release: str
    """Of the program, where the row is of another than those that constants are fitted to."""
    source: str

    def implementation(self, software: str) -> Implementation:
        """The traits of the software that this step ran on."""
        gated, wide = self.architecture.gated, self.gradients_in_fp32
        return software_of(software, dtype=self.dtype, gated=gated, gradients_in_fp32=wide)

    @property
    def tokens_per_s(self) -> float:
        """Of one device."""
        layout = self.layout
        tokens = layout.micro_batch_size * layout.num_micro_batches * layout.dp * self.architecture.tokens
        return tokens / self.step_time_s / layout.world_size


@functools.lru_cache(maxsize=16)
def published_steps(file: str) -> tuple[PublishedStep, ...]:
    """The rows of a file of ``data``, without its ending; ConfigurationError names the files there are."""
    path = DATA / f"{file}.json"
    if not path.exists():
        files = sorted(other.stem for other in DATA.glob("*.json") if not other.stem.endswith("benchmarks"))
        raise ConfigurationError(f"table {file!r} is unknown; {did_you_mean(file, files)}")
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return tuple(_step(row) for row in rows if "step_time_s" in row)


def _step(row: Mapping[str, Any]) -> PublishedStep:
    source = row["source"]
    return PublishedStep(
        id=row["id"],
        model=row["model"],
        architecture=_architecture(row),
        layout=_layout(row),
        dtype=row["dtype"],
        device=row["device"],
        devices_per_node=row["per_node"],
        network_gb_per_s=row["network_gbit_per_node"] / 8 if "network_gbit_per_node" in row else 0.0,
        step_time_s=row["step_time_s"],
        memory_gib=row.get("memory_gib"),
        memory_kind=row.get("memory_kind") or "",
        gradients_in_fp32=row["sharding"] != "fsdp-pure",
        release=row.get("release", ""),
        source=", ".join(str(source[key]) for key in ("repository", "commit", "file") if key in source),
    )


def _architecture(row: Mapping[str, Any]) -> Architecture:
    latent = bool(row.get("kv_lora"))
    return Architecture(
        name=row["model"],
        layers=row["layers"],
        width=row["hidden"],
        heads=row["heads"],
        key_heads=row["kv_heads"],
        hidden=row["ffn"],
        gated=row["glu"],
        vocabulary=row["vocab"],
        tokens=row["seq"],
        tied=row["tied"],
        positions=row["seq"] if row["learned_positions"] else 0,
        biases=row["family"] == "gpt" and "norm" not in row and "activation" not in row,
        head_width=row.get("qk_head_dim", 0),
        value_width=row.get("v_head_dim", 0),
        query_rank=row.get("q_lora", 0),
        key_rank=row.get("kv_lora", 0),
        rope_width=row["qk_head_dim"] - row["v_head_dim"] if latent else 0,
        experts=row.get("experts", 0),
        top_k=row.get("top_k", 0),
        expert_hidden=row.get("expert_ffn", 0),
        shared_hidden=row.get("shared_experts", 0) * row.get("expert_ffn", 0),
        dense_layers=row.get("dense_layers", 0),
    )


def _layout(row: Mapping[str, Any]) -> Layout:
    """The mesh as printed.  The ranks of ep are also ranks of dp.  State is sharded in ``copies`` groups of dp."""
    replicas, copies = row["dp"] // row["ep"], row.get("copies", 1)
    data = {"dp": replicas} if copies == 1 else {"dp_replicate": copies, "dp_shard": replicas // copies}
    sizes = {"pp": row["pp"], **data, "ep": row["ep"], "cp": row["cp"], "tp": row["tp"]}
    return Layout(
        shape=MeshShape.of(**{axis: size for axis, size in sizes.items() if size > 1}),
        sharding=_SHARDING[row["sharding"]],
        schedule=row["schedule"],
        stages_per_rank=row["vpp"],
        micro_batch_size=row["micro_batch"],
        num_micro_batches=int(row["accumulation"]),
        checkpointing=row["recompute"],
        sequence_parallel=row["sp"],
    )
