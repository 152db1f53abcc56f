"""What collectives send over links: the table against what the outputs of the workloads need; its gaps are errors."""

import math
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.collectives import TRAFFIC, busbw_factor, link_bound_gb_per_s, partner, traffic
from perfsuite.base.errors import InvalidParameter
from perfsuite.metrics import derive
from perfsuite.record.result import Peaks, Work
from perfsuite.strategies.pipeline import Pipeline
from perfsuite.workloads import collective
from perfsuite.workloads.collective_base import Collective, Endpoint

CLASSES = {
    each.name: each
    for each in vars(collective).values()
    if isinstance(each, type) and issubclass(each, Collective) and "name" in vars(each)
}
UNKNOWN = Work(collective="neighbour_shift")
MEASURED = types.SimpleNamespace(median_s=1.0, records=(), smoke=False)
MOVING = sorted(name for name, each in CLASSES.items() if not each.summed)


def needed(workload, count, hosts):
    """Elements that the busiest host must take in from others, or give away: each but once, per element of S."""
    ranks = len(hosts)
    incoming = {host: set() for host in hosts}
    outgoing = {host: set() for host in hosts}
    for rank, host in enumerate(hosts):
        for source, start, length in workload.expected(count, ranks, rank):
            elements = {(source, index) for index in range(start, start + length)}
            if hosts[source] != host:
                incoming[host] |= elements
                outgoing[hosts[source]] |= elements
    return max(len(elements) for end in (incoming, outgoing) for elements in end.values()) / count


def test_every_collective_of_the_suite_has_an_entry_and_every_entry_a_collective():
    assert set(TRAFFIC) == set(CLASSES)


@pytest.mark.parametrize("name", MOVING)
@settings(max_examples=30, derandomize=True, database=None, deadline=None)
@given(hosts=st.lists(st.integers(0, 3), min_size=2, max_size=8).filter(lambda hosts: len(hosts) % 2 == 0))
def test_the_traffic_is_what_the_outputs_need(name, hosts):
    count = len(hosts) ** 2
    workload = CLASSES[name](message_bytes=count, dtype="int8")
    assert needed(workload, count, hosts) == pytest.approx(traffic(name, hosts))


@pytest.mark.parametrize("name", sorted(TRAFFIC))
def test_with_a_host_for_each_rank_the_bound_is_the_link(name):
    for ranks in (2, 4, 6, 16):
        assert link_bound_gb_per_s(25.0, range(ranks), name) == pytest.approx(25.0)
        assert link_bound_gb_per_s(25.0, ["here"] * ranks, name) == 25.0


def test_ranks_dealt_out_in_turn_may_have_their_partner_on_their_own_host():
    assert link_bound_gb_per_s(25.0, [0, 1, 0, 1], "send_recv") == math.inf
    assert link_bound_gb_per_s(25.0, [0, 1, 0, 1], "ring_shift") == 12.5


def test_partners_are_on_two_hosts_wherever_no_host_has_more_than_half_of_the_ranks():
    for hosts, per_host in ((2, 1), (2, 2), (2, 8), (3, 2), (3, 4), (4, 8)):
        ranks = hosts * per_host
        assert all(rank // per_host != partner(rank, ranks) // per_host for rank in range(ranks))
        assert all(partner(partner(rank, ranks), ranks) == rank for rank in range(ranks))


def test_an_unknown_collective_is_refused_where_it_is_named():
    for use in (
        lambda: derive(["busbw_gb_per_s"], work=UNKNOWN, measurement=MEASURED, peaks=Peaks()),
        lambda: busbw_factor("neighbour_shift", 8),
        lambda: link_bound_gb_per_s(25.0, [0, 0, 1, 1], "neighbour_shift"),
    ):
        with pytest.raises(InvalidParameter, match=r"collective 'neighbour_shift' has no entry .* choose all_gather, "):
            use()
    with pytest.raises(InvalidParameter, match="barrier moves no message"):
        busbw_factor("barrier", 8)


class Posts:
    """Stands in for torch.distributed: notes what is posted, in order."""

    isend, irecv = "isend", "irecv"

    def __init__(self):
        self.posted = []

    def P2POp(self, operation, buffer, peer, group):
        return operation, peer

    def batch_isend_irecv(self, operations):
        self.posted += operations
        return [types.SimpleNamespace(wait=lambda: None) for _ in operations]

    def get_rank(self, group=None):
        return 0

    def get_global_rank(self, group, rank):
        return rank


@pytest.mark.parametrize(
    ("kind", "rank", "device", "expected"),
    [
        (collective.SendRecv, 1, "cpu", [("irecv", 13), ("isend", 13)]),
        (collective.SendRecv, 3, "cpu", [("irecv", 11), ("isend", 11)]),
        (collective.RingShift, 0, "cpu", [("irecv", 13), ("isend", 11)]),
        (collective.OneDirection, 1, "cpu", [("isend", 13)]),
        (collective.OneDirection, 2, "cpu", [("irecv", 10)]),
        # Where messages of a pair run in the order of posting, two receives would wait for each other.
        (collective.SendRecv, 1, "musa", [("isend", 13), ("irecv", 13)]),
        (collective.SendRecv, 3, "musa", [("irecv", 11), ("isend", 11)]),
        (collective.RingShift, 3, "musa", [("irecv", 12), ("isend", 10)]),
    ],
)
def test_on_a_cpu_a_receive_is_posted_before_the_send(kind, rank, device, expected):
    """The other way round gloo's two directions take turns: half of a full-duplex link."""
    posts, source = Posts(), types.SimpleNamespace(device=types.SimpleNamespace(type=device))
    end = Endpoint(rank=rank, ranks=4, group=None, ranks_in_world=(10, 11, 12, 13), source=source, target=None)
    kind(message_bytes=4).operation(posts, end)()
    assert expected == posts.posted


def test_so_is_that_of_a_gradient_that_two_stages_share(monkeypatch):
    posts = Posts()
    monkeypatch.setattr("perfsuite.strategies.pipeline.dist", posts)
    pipeline = types.SimpleNamespace(group=None)
    Pipeline.exchange(pipeline, torch.zeros(2), between=(0, 1))
    assert posts.posted == [("irecv", 1), ("isend", 1)]


@pytest.mark.parametrize("collective", TRAFFIC)
def test_the_factor_of_busbw_is_the_traffic_of_ranks_on_hosts_of_their_own(collective):
    for ranks in range(1, 40):
        assert busbw_factor(collective, ranks) == pytest.approx(traffic(collective, range(ranks)), rel=1e-12)
    assert 0.5 <= busbw_factor(collective, 10**12) <= 2  # a table of others may have a slip; it takes no memory
