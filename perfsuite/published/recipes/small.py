"""Small siblings of recipes that no other test has: Latte with larger batches and under DeepSpeed, until it learned."""

from __future__ import annotations

from perfsuite.published.recipes.recipe import Recipe


def _latte(strategy: str, batch: int, prefix: str) -> Recipe:
    return Recipe(
        name=f"{prefix}-latte-tiny-{strategy}-b{batch}-w1-1x2",
        rows=(),
        parameters={
            "model": "latte-tiny",
            "strategy": strategy,
            "micro_batch_size": batch,
            "data": "generated",
            "num_workers": 1,
            "learning_rate": 1e-3,  # so small a model has begun to learn within the loss build's steps
            "builds": ("memory", "loss"),
            "loss_steps": 40,
            "target_loss": 0.9,
        },
        world_size=2,
    )


SMALL: tuple[Recipe, ...] = (
    _latte("ddp", 2, "001"),
    _latte("ddp", 1, "001"),
    _latte("ddp", 4, "001"),
    *(_latte(strategy, 1, "001d") for strategy in ("zero1", "zero2", "zero3")),
)
"""For two ranks of a CPU; the first belongs to a plain run, the others are extended."""
