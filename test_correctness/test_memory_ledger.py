"""What a CPU's ledger counts: every byte of this thread, by address, collectives as a whole."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.workloads.training.memory import CpuLedger, running_sums, within_collectives


def test_the_ledger_has_every_byte_and_the_peak_between_its_marks():
    before = torch.ones(1 << 12)
    ledger = CpuLedger()
    with ledger.observing():
        kept = torch.ones(1000)
        torch.ones(1 << 20)  # before the start: no peak of the step's
        ledger.mark("start")
        del before  # it was there before the books were opened
        passing = [torch.ones(500), torch.ones(250)]
        ledger.mark("after forward")
        passing.clear()
        ledger.mark("final")
        torch.ones(1 << 20)
    assert {"start": 4000, "after forward": 7000, "final": 4000, "peak": 7000} == ledger.totals()
    assert kept.numel() == 1000


def history(sizes, seen_bytes):
    """One collective from 10 to 20 that allocates for itself; what is seen to end, and when, is a matter of chance."""
    events = [(1, 1, 100)]
    for index, size in enumerate(sizes):
        events.append((11 + index, 2 + index, size))
    for index, (size, seen) in enumerate(zip(sizes, seen_bytes, strict=True)):
        if seen is not None:
            events.append((seen, 2 + index, -size))
    events.append((30, 2, 7))  # the address of what may not have been seen to end
    return sorted(events, key=lambda each: each[0])


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.one_of(st.none(), st.integers(15, 18), st.integers(22, 28))),
        min_size=1,
        max_size=4,
    )
)
def test_when_a_collective_s_own_buffers_are_seen_to_end_changes_nothing(buffers):
    sizes = [size for size, _ in buffers]
    events = history(sizes, [seen for _, seen in buffers])
    totals = running_sums(within_collectives(events, [(10, 20)]), {"start": 5, "after forward": 25, "final": 40})
    assert {"start": 100, "after forward": 100, "final": 107, "peak": 100 + max(sum(sizes), 7)} == totals
