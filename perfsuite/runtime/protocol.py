"""JSON commands from the driver to the rank workers, and the workers' answers.

======  ==========================================  ==================================================================
verb    fields                                      final answer (a worker may send ``{"phase": ...}`` before it)
======  ==========================================  ==================================================================
form    rank, local_rank, world_size,               ``{"done": {}}`` once the rank is in its process group
        local_world_size, family, backend, binds,
        device, shares, cores, share, ``beside``,
        pin,
        store_host, store_port, generation,
        timeout_s
run     workload (see runtime.values), shape,       ``{"done": report}`` with the rank's timings
        budget, purpose, checks_twin, metrics
facts   family                                      ``{"done": {...}}``: torch and library versions
store   host                                        ``{"done": {"port": ...}}``; the process then serves a TCPStore
                                                    there
leave   --                                          ``{"done": {}}`` once the rank has left its process group
======  ==========================================  ==================================================================

Any verb may answer ``{"error": {"kind", "message", "traceback", "phase", "types"}}``. ``kind`` is one of ERROR_KINDS.
``types`` lists module and name of the exception's class and of its base classes.
``binds``: the backend belongs to the device and may bind to it from the start. ``shares``: ranks share devices.
``beside`` lists the ranks that may use the same ``cores``; this rank has position ``share`` among them.
``checks_twin``: check the workload's twin first. ``metrics``: registered metrics by field. ``timeout_s``: time limit
for joining the process group; the group itself has a longer one (:mod:`perfsuite.runtime.ranks.arrival`).
"""

from __future__ import annotations

import json

from perfsuite.runtime.transports.base import Message

CLEAN_ERRORS = ("wrong_result", "invalid_parameter", "unsupported", "skipped", "expected_failure")
"""Kinds that every rank raises alike, before or between collectives; the worker can be used again.

The last two are pytest's outcomes, raised on a rank.
"""
PROFILER = "profiler of torch"
"""Entry of a process's changed settings: torch's profiler ran in it.

CUPTI then stays attached on CUDA devices and slows launches (pytorch/pytorch#144455): the process is not used again.
"""
TIMING = "timing"  # Phase in which a rank takes its samples.
ERROR_KINDS = (*CLEAN_ERRORS, "unusable", "refused", "out_of_memory", "exception")
"""``unusable``: torch cannot use the rank's device. ``refused``: perfsuite cannot run the case on that rank."""


def encode(message: Message) -> bytes:
    """Return one frame."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(frame: bytes) -> Message:
    """Return the message of one frame; raise ValueError if it is not a JSON object."""
    message = json.loads(frame)
    if not isinstance(message, dict):
        raise ValueError(f"a frame is a JSON object, not {frame[:60]!r}")
    return message
