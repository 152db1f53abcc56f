"""Commands that the driver sends to rank workers and the messages that come back: JSON objects, never pickles.

======  ==========================================  ==================================================================
verb    fields                                      final answer (a worker may send ``{"phase": ...}`` before it)
======  ==========================================  ==================================================================
form    rank, local_rank, world_size,               ``{"done": {}}`` once the rank is in its process group
        local_world_size, family, backend, binds,
        device, shares, cores, share, beside, pin,
        store_host, store_port, generation,
        timeout_s
run     workload (see runtime.values), shape,       ``{"done": report}`` with the rank's timings
        budget, purpose, checks_twin, metrics
facts   family                                      ``{"done": {...}}``: torch and library versions
store   host                                        ``{"done": {"port": ...}}``; the process then serves a TCPStore on
                                                    that address
leave   --                                          ``{"done": {}}`` once the rank has left its process group
======  ==========================================  ==================================================================

Any verb may answer ``{"error": {"kind", "message", "traceback", "phase", "types"}}``; ``kind`` is one of ERROR_KINDS,
``types`` are module and name of the exception's class and those that it inherits from.
``binds``: the backend is the device's own, which may know its device from the start.  ``shares``: ranks share devices.
``beside`` are the ranks that may use the same ``cores``; the rank is the one at ``share`` among them.  ``checks_twin``:
after its twin.  ``metrics``: registered ones by field.  ``timeout_s`` is how long joining may take; the process group
itself waits for longer than any case (see :mod:`perfsuite.runtime.ranks.rendezvous`).
"""

from __future__ import annotations

import json

from perfsuite.runtime.transports.base import Message

CLEAN_ERRORS = ("wrong_result", "invalid_parameter", "unsupported", "skipped", "expected_failure")
"""Every rank raises alike before or between collectives, and its worker can go on.

The last two are pytest's, called on a rank.
"""
PROFILER = "profiler of torch"
"""Among the changed settings of a process: torch's profiler ran in it.

On CUDA devices CUPTI stays attached and slows launches (pytorch/pytorch#144455): no further build has the process.
"""
TIMING = "timing"
"""The phase in which a rank takes its samples."""
ERROR_KINDS = (*CLEAN_ERRORS, "unusable", "refused", "out_of_memory", "exception")
"""``unusable``: torch cannot use the rank's device.  ``refused``: perfsuite itself cannot run the case on that rank."""


def encode(message: Message) -> bytes:
    """One frame."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(frame: bytes) -> Message:
    """The message of one frame; ValueError when it is not a JSON object."""
    message = json.loads(frame)
    if not isinstance(message, dict):
        raise ValueError(f"a frame is a JSON object, not {frame[:60]!r}")
    return message
