"""Report 004: one layer split, long sequences, ways to attend over a split one, experts, five axes at once."""

from __future__ import annotations

from collections.abc import Iterator

from perfsuite.published.recipes.recipe import Recipe, layout, lines

_LINEAR = "test_perf/test_tensor_parallel.py::test_column_and_row"
_LONG = "test_perf/test_long_sequences.py"
_EXPERTS = "test_perf/test_experts.py"
_COMPONENTS = "test_perf/test_meshes.py::test_components"
_HEADS = "its 25 heads do not divide by four, which the rows need: 20 of 80 features"
_ATTENTION = {
    "dtype": "not named: bf16, in which flash attention runs",
    "strategy": "sequences are split along an axis of a mesh: strategy hybrid",
    "num_heads": _HEADS,
    "vocabulary": "padded to a multiple of 128, which four ranks divide",
    "checkpointing": "not named: every block, as 32768 tokens need",
    "micro_batch_size": "not named: one sample at a time",
    "num_micro_batches": "follows from the micro-batch",
    "global_batch_size": "a batch of 16 is said: of all samples of a step",
    "devices": "four, as the block says of its longest sequence",
    "mesh": "four devices share a sequence",
    "sequence_parallel": "the block is about it",
    "context": "as in the row's name",
}
_XL = {"model": "gpt2-xl", "dtype": "bf16", "checkpointing": "full", "strategy": "hybrid"}


def split_layer() -> Iterator[Recipe]:
    """Y = X W of 8192 x 8192 on one card, by columns and by rows on four."""
    own = {
        "mesh": "every card has a part: tp",
        "rows": "not said: as many as features",
        "dtype": "not said: bf16, as the products of the other blocks",
    }
    for split, line in (("none", 329), ("column", 330), ("row", 331)):
        ranks = 1 if split == "none" else 4
        yield Recipe(
            name=f"004-linear-8192x8192-{split}-1x{ranks}",
            rows=lines("004/column-row", line),
            workload="tensor_linear",
            parameters={
                "split": split,
                "mesh": "1" if ranks == 1 else f"tp{ranks}",
                "features_in": 8192,
                "features_out": 8192,
                "rows": 8192,
                "dtype": "bf16",
            },
            world_size=ranks,
            own=own,
            test=_LINEAR,
            words=f"8192x8192-{split}",
            small=f"{_LINEAR}[cpu-512x512-{split}]",
        )


def _overrides(length: int) -> dict[str, int]:
    return {"heads": 20, "words_multiple": 128, "context": length, "sequence_length": length}


def sequences() -> Iterator[Recipe]:
    """2048 to 32768 tokens with sequence parallelism, and three ways to attend over 16384."""
    for index, length in enumerate((2048, 4096, 8192, 16384, 32768)):
        yield Recipe(
            name=f"004-gpt2-xl-s{length}-1x4",
            rows=lines("004/long-sequences", 350 + index),
            parameters={
                **_XL,
                "overrides": _overrides(length),
                "global_batch_size": 16,
                "mesh": "tp4",
                "accumulation": 16,
                "options": {"sequence_parallel": True},
                "builds": ("memory",),
            },
            world_size=4,
            own=_ATTENTION,
            test=f"{_LONG}::test_long_sequences",
            words=f"{length}-sequence",
            small=f"{_LONG}::test_long_sequences[cpu-{256 << index}-sequence]",
        )
    ways = (("standard", "dp4", "math", 369), ("flash", "dp4", "flash", 370), ("ring", "cp4", "flash", 371))
    for method, mesh, attention, line in ways:
        yield Recipe(
            name=f"004-gpt2-xl-s16384-{method}-1x4",
            rows=lines("004/ring-attention", line),
            parameters={
                **_XL,
                "overrides": _overrides(16384),
                "global_batch_size": 16,
                "mesh": mesh,
                "accumulation": 16 if mesh == "cp4" else 4,
                "attention": attention,
                "options": {"context": "ring"} if mesh == "cp4" else {},
                "builds": ("memory", "exposed", "traffic"),
            },
            world_size=4,
            own={**_ATTENTION, "mesh": "ring attention shares a sequence, the others have whole ones"},
            test=f"{_LONG}::test_attention",
            words=f"16384-{method}",
            small=f"{_LONG}::test_attention[cpu-1024-{method}]",
        )


def experts() -> Iterator[Recipe]:
    """A dense model and 64 experts of as many active parameters; one layer's routing by batch; all five axes."""
    own = {
        "dtype": "not named: bf16, over whose peak MFU is",
        "strategy": "every card has samples of its own, and experts: strategy hybrid",
        "sequence_length": "not named: 2048, GPT-3's",
        "micro_batch_size": "no batch is said: one sample",
        "num_micro_batches": "no batch is said",
        "global_batch_size": "no batch is said: one sample on every card",
        "checkpointing": "not named",
        "mesh": "not named: state over all cards, experts over the eight of a node",
    }
    training = {"strategy": "hybrid", "dtype": "bf16", "checkpointing": "full", "builds": ("memory",)}
    runs = (
        ("gpt3-175b", "dp32", 32, 388, "moe-tiny-dense"),
        ("moe-1.3t", "dp8-ep8", 64, 390, "moe-tiny-64"),
    )
    for model, mesh, ranks, line, small in runs:
        yield Recipe(
            name=f"004-{model}-{mesh}-{layout(ranks)}",
            rows=lines("004/moe", line),
            parameters={**training, "model": model, "mesh": mesh},
            world_size=ranks,
            own=own,
            small=f"{_EXPERTS}::test_experts_and_dense[cpu-{small}]",
        )
    yield Recipe(
        name="004-moe-1.6t-pp8-dp2-ep2-cp2-tp4-32x8",
        rows=lines("004/5d", 444, 445, 446, 447, 448, 450),
        parameters={
            **training,
            "model": "moe-1.6t",
            "mesh": "pp8-dp2-ep2-cp2-tp4",
            "accumulation": 32,
            "builds": ("traffic",),
        },
        world_size=256,
        own=own,
        test=_COMPONENTS,
        words="pp8-dp2-ep2-cp2-tp4",
        small=f"{_COMPONENTS}[cpu-pp2-ep2-cp2-tp2]",
    )


def routing() -> Iterator[Recipe]:
    """One layer of 64 experts on eight cards, top 2, by samples of a batch."""
    own = {
        "mesh": "eight experts on every card: ep",
        "experts": "eight on each of eight cards, as the block says",
        "sequence_length": "not said: 2048",
        "width": "not said: Mixtral's",
        "hidden": "not said: Mixtral's",
        "dtype": "not said: bf16",
        "implementation": "perfsuite's layer",
    }
    for index, batch in enumerate((32, 64, 128, 256)):
        yield Recipe(
            name=f"004-routing-b{batch}-1x8",
            rows=lines("004/router", 404 + index),
            workload="moe_layer",
            parameters={
                "mesh": "ep8",
                "batch_size": batch,
                "sequence_length": 2048,
                "width": 4096,
                "hidden": 14336,
                "experts": 64,
                "top_k": 2,
                "dtype": "bf16",
                "implementation": "perfsuite",
            },
            world_size=8,
            own=own,
            test=f"{_EXPERTS}::test_routing",
            words=f"{batch}x2048x4096x14336-top2",
            small=f"{_EXPERTS}::test_routing[cpu-{batch}x16x64x128-top2]",
        )
