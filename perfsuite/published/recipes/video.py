"""Reports 000 (Open-Sora on S4000) and 001 (Latte with DDP; under DeepSpeed, a heading without figures)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perfsuite.published.recipes.recipe import TEST, Recipe, layout, lines

_OPENSORA = {
    "strategy": "not named: 8.575 of the optimizer's GiB fall as 1/N and are 12 bytes for each of 760 million "
    "parameters, so the wide copy and both moments are spread, and gradients with them (ZeRO-2)",
    "reshard": "as in the strategy: parameters are not spread",
    "mixed_precision": "as in the dtype",
    "dtype": "12 spread bytes for a parameter are those of training in 16 bits; bf16 is the default of Open-Sora's "
    "public scripts",
    "mesh": "memory falls with the cards as spread state does, and with nothing else",
    "checkpointing": "not named",
    "sequence_length": "512 in the table of compute, of the same runs; 16 frames of 256 x 256 become so many as 2 "
    "latent frames of 16 x 16 patches",
    "micro_batch_size": "a batch of 1 in the table of compute, of the same runs",
    "num_micro_batches": "not named",
    "global_batch_size": "one clip for every card, by the batch of 1",
}
_LATTE = {
    "sequence_length": "16 frames of 256 x 256, Latte's own; the report names no size",
    "dtype": "the forward runs on tensor cores with their fp16 peak, says the report's first paragraph",
    "num_workers": "16 where a row leaves them unsaid, as in the rows of the A6000: 8 and 16 made no difference",
    "dataset_samples": "704 videos, as the report has; its videos do not come with it",
    "data": "files of 704 videos of noise: the report's videos do not come with it",
    "checkpointing": "not named",
    "micro_batch_size": "global batch = local batch x cards: there is no accumulation",
    "num_micro_batches": "global batch = local batch x cards: there is no accumulation",
}
_LATTE_L = (  # local batch, workers, ranks, lines
    (1, 8, 1, (28,)),
    (1, 16, 1, (23, 29, 37)),
    (1, 16, 8, (24, 30)),
    (1, 16, 16, (25, 31)),
    (2, 16, 16, (26, 32)),
    (4, 16, 16, (33,)),
    (1, 16, 24, (34,)),
    (2, 16, 24, (35,)),
)
_LATTE_XL = tuple((2, 16, ranks, (line,)) for ranks, line in ((1, 52), (8, 53), (16, 54), (24, 55), (32, 56)))
_LEARNS: dict[str, Any] = {
    "dtype": "fp16",
    "data": "generated",
    "builds": ("memory", "loss"),
    "loss_steps": 100,
    "target_loss": 0.9,  # who predicts nothing has a loss of 1: a Latte that begins to learn
}


def opensora() -> Iterator[Recipe]:
    """Report 000: 512 tokens of a clip of 16 x 256 x 256, one clip per card."""
    for index, ranks in enumerate((1, 2, 4, 8)):
        yield Recipe(
            name=f"000-opensora-{layout(ranks)}",
            rows=tuple(
                row
                for table, first in (("overview", 8), ("compute", 18), ("time", 26), ("memory", 34))
                for row in lines(f"000/{table}", first + index)
            ),
            parameters={
                "model": "opensora",
                "overrides": {"frames": 2},  # 2 latent frames of 16 x 16 patches: the printed 512 tokens
                "strategy": "fsdp",
                "options": {"reshard": False, "mixed_precision": True},
                "micro_batch_size": 1,
                "dtype": "bf16",
                "builds": ("memory", "loss"),
            },
            world_size=ranks,
            own=_OPENSORA,
            small=f"test_perf/test_train_step.py::test_opensora[cpu-ws{ranks}-opensora-tiny]",
        )


def latte() -> Iterator[Recipe]:
    """Report 001: every local batch and number of cards, rows without figures too; DeepSpeed's empty section."""
    siblings = {batch: f"{TEST}[cpu-001-latte-tiny-ddp-b{batch}-w1-1x2]" for batch in (1, 2, 4)}
    for model, table, runs in (("latte-l", "001/latte-l", _LATTE_L), ("latte-xl", "001/latte-xl", _LATTE_XL)):
        for batch, workers, ranks, numbers in runs:
            parameters = {"model": model, "strategy": "ddp", "micro_batch_size": batch, "num_workers": workers}
            yield Recipe(
                name=f"001-{model}-b{batch}-w{workers}-{layout(ranks)}",
                rows=lines(table, *numbers),
                parameters={**parameters, **_LEARNS},
                world_size=ranks,
                own=_LATTE,
                small=siblings[batch],
            )
    for strategy in ("zero1", "zero2", "zero3"):
        parameters = {"model": "latte-l", "strategy": strategy, "micro_batch_size": 1, "num_workers": 16}
        yield Recipe(
            name=f"001d-latte-l-{strategy}-b1-w16-1x8",
            rows=(),
            parameters={**parameters, **_LEARNS},
            world_size=8,
            own=_LATTE,
            small=f"{TEST}[cpu-001d-latte-tiny-{strategy}-b1-w1-1x2]",
        )
