"""Names of the metrics of training steps: of parts, of whole models, of stages, and of the untimed builds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PARTS = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms", "backward_with_optimizer_ms", "remainder_ms")
"""Metrics of a rank that runs one part after the other."""
STAGES = (
    "bubble_ratio",
    "bubble_to_ideal_ratio",
    "median_bubble_ratio",
    "simulated_bubble_ratio",
    "balanced_bubble_ratio",
    "in_flight_micro_batches",
    "warm_up_percent",
    "steady_percent",
    "cool_down_percent",
)
"""Metrics of the timeline of a pipeline."""
MEMORY = (
    "weights_gib",
    "gradients_gib",
    "optimizer_gib",
    "encoders_gib",
    "ema_gib",
    "activations_gib",  # of one forward, if a rank has the whole model
    "peak_activations_gib",  # of all micro-batches in flight, if it has stages
    "peak_gib",
    "fragmentation_gib",
    "final_device_gib",
    "untracked_gib",
    "final_host_gib",
    "whole_device_gib",
)
EXPERTS = ("expert_imbalance", "dropped_percent", "balance_loss")  # Metrics of models with experts
BUILDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "memory": MEMORY,
        "exposed": (
            "exposed_communication_percent",
            "exposed_communication_low_percent",
            "exposed_communication_high_percent",
            "exposed_kernels_percent",
        ),
        "flops": ("counted_tflop",),
        "loss": ("final_loss", "time_to_target_s"),
        "traffic": (
            "communication_time_s",
            "compute_time_s",
            "communication_bytes",
            "communication_percent",
            *(f"{axis}_busbw_gb_per_s" for axis in ("dp", "tp", "cp", "ep", "pp")),
        ),
    }
)
"""Metrics of each build."""
