"""Process groups over a session: formed and left by all of their ranks together, used again where they can be."""

import os
import signal

import pytest

from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import Budget, FunctionWorkload, Process
from perfsuite.runtime.driver import Job
from simmusa.costs import Costs
from test_correctness.helpers import several, steps
from test_correctness.helpers.local_driver import driver_fixture
from test_correctness.helpers.simmusa_ranks import KERNELS, opened, require_built

ONCE = Budget(smoke=True, timeout_s=30.0)
SLOW = pytest.mark.slow


class OfItsOwn(FunctionWorkload):
    """In processes that no other case gets."""

    @property
    def process(self):
        return Process()


def run(driver, ranks, *, mesh="", workload=FunctionWorkload, fresh=False, function=steps.held, **arguments):
    """What the ranks recorded, by name."""
    shape = MeshShape.parse(mesh) if mesh else None
    case = workload(function=function, arguments=arguments)
    measured = driver.run(Job(workload=case, world_size=ranks, budget=ONCE, fresh=fresh, shape=shape))
    return {record.name: int(record.value) for record in measured.records}


def processes(records, *ranks):
    return [records[f"process{rank}"] for rank in ranks]


driver = driver_fixture()


@pytest.fixture(scope="module")
def devices(tmp_path_factory):
    """Ranks on simulated devices, whose communicators end when all of their ranks destroy them."""
    require_built()
    with opened(Costs(), tmp_path_factory.mktemp("ranks"), KERNELS) as session:
        yield session.driver


def change(driver, sizes):
    """One case of each size; the descriptors that rank 0 held in each."""
    return [run(driver, size)["descriptors0"] for size in sizes]


@pytest.mark.extended
def test_ranks_of_a_larger_group_leave_it_before_a_smaller_one_is_formed(devices):
    whole = processes(run(devices, 4), 0, 1, 2, 3)
    assert processes(run(devices, 2), 0, 1) == whole[:2]
    assert processes(run(devices, 4), 0, 1, 2, 3) == whole


@pytest.mark.extended
def test_ranks_are_replaced_after_they_left_the_group_of_those_that_stay(devices):
    whole = processes(run(devices, 3), 0, 1, 2)
    alone = processes(run(devices, 1, fresh=True), 0)
    assert processes(run(devices, 3), 0, 1, 2) == [*alone, *whole[1:]]


@pytest.mark.extended
def test_a_rank_that_died_between_two_cases_ends_its_group(devices):
    whole = processes(run(devices, 3), 0, 1, 2)
    os.kill(whole[1], signal.SIGKILL)
    while not devices._transport._slots[1].ended:
        devices._transport.poll(1.0)
    assert not set(processes(run(devices, 3), 0, 1, 2)) & set(whole)


def test_a_rank_whose_end_nobody_has_told_yet_fails_no_case(driver, monkeypatch):
    whole = processes(run(driver, 2), 0, 1)
    transport = driver._transport
    forkserver, real, looked = transport._servers[1 % transport._layouts].process.pid, transport._look, []

    def look(*arguments):
        looked.append(arguments)
        if len(looked) == 2:
            os.kill(forkserver, signal.SIGCONT)
        real(*arguments)

    os.kill(forkserver, signal.SIGSTOP)
    try:
        os.kill(whole[1], signal.SIGKILL)
        transport._slots[1].link.poll(30.0)  # its end of the link is closed with it
        monkeypatch.setattr(transport, "_look", look)
        assert not set(processes(run(driver, 2), 0, 1)) & set(whole)
    finally:
        os.kill(forkserver, signal.SIGCONT)


@pytest.mark.extended
def test_descriptors_do_not_grow_with_the_world_sizes(devices):
    counts = change(devices, (2, 3) * 6)
    assert counts[2:4] == counts[-2:]


@SLOW
def test_200_cases_of_changing_world_size_leave_nothing_behind(devices):
    counts = change(devices, (8, 2, 4, 1) * 50)
    assert counts[4:8] == counts[-4:]


def test_a_mesh_of_one_axis_is_the_world_and_its_group_is_used_again(driver):
    run(driver, 2)
    before = driver._generation
    run(driver, 2, mesh="dp2", axes="dp")
    run(driver, 2)
    assert driver._generation == before


def test_a_mesh_over_gloo_makes_no_group_of_its_own_where_there_is_cuda(driver):
    assert {"same": 1} == run(driver, 2, mesh="dp2", function=several.mesh_beside_cuda)


@pytest.mark.extended
@pytest.mark.parametrize("case", [{"groups": 1}, {"mesh": "dp2-tp2", "axes": "tp"}], ids=str)
def test_groups_that_a_case_made_end_with_it(driver, case):
    run(driver, 4)
    before = driver._generation
    run(driver, 4, **case)
    run(driver, 4)
    assert driver._generation == before + 1


@pytest.mark.extended
def test_no_rank_of_a_case_with_processes_of_its_own_serves_another(driver):
    own = processes(run(driver, 3, workload=OfItsOwn), 0, 1, 2)
    run(driver, 1)
    assert not set(processes(run(driver, 3), 0, 1, 2)) & set(own)
