"""Sweeps over ranks follow the launch or --perf-world-sizes; a size may say the ranks of its case."""

import pytest

from test_correctness.helpers.scripted_driver import Launched, repository

TESTS = """
@world_sizes(2, 4, more=True, extended=[4])
def test_all(perf, ranks):
    perf(step, on=ranks)

@world_sizes(1, 2, more=True, full=[])
def test_beyond(perf, ranks):
    perf(step, on=ranks)

@world_sizes(2)
def test_pair(perf, ranks):
    perf(step, on=ranks)

@sizes(param="mesh", full=["dp8"], small=["dp3"], ranks=lambda mesh: int(mesh[2:]))
def test_meshes(perf, mesh):
    perf(step, on=int(mesh[2:]))
"""


WHOLE = """
@world_sizes(2, more="whole", full=[2, 4])
def test_whole(perf, ranks):
    perf(step, on=ranks)
"""


def collected(pytester, monkeypatch, *options, capacity=None, tests=TESTS):
    """Names of the cases of a launch with so many ranks, extended ones too."""

    class Watching:
        def pytest_collection_finish(self, session):
            self.names = [item.name for item in session.items]

    repository(pytester, monkeypatch, tests)
    watching = Watching()
    launches = [Launched(capacity)] if capacity else []
    pytester.inline_run("--collect-only", *options, plugins=[watching, *launches])
    return watching.names


POWERS = (("", 1), ("beyond ", 2))


@pytest.mark.parametrize(
    ("capacity", "options", "found"),
    [
        (None, [], ["ws2", "ws4", "beyond ws1", "beyond ws2"]),
        (16, [], ["ws2", "ws4", "ws8", "ws16", "beyond ws1", "beyond ws2", "beyond ws4", "beyond ws8", "beyond ws16"]),
        (6, ["--perf-scale=full"], ["ws2", "ws4", "ws6", "beyond ws4", "beyond ws6"]),
        (4, ["--perf-scale=full"], ["ws2", "ws4", "beyond ws4"]),  # a whole launch that the sweep has too is there once
        (512, ["--perf-scale=full"], [f"{test}ws{1 << n}" for test, least in POWERS for n in range(least, 10)]),
        (16, ["--perf-world-sizes=8, 1,3"], ["ws3", "ws8", "beyond ws1", "beyond ws3", "beyond ws8"]),
        (None, ["--perf-world-sizes=3,2", "--perf-scale=full"], ["ws2", "ws3", "beyond ws3"]),
    ],
)
def test_world_sizes_follow_the_launch_or_the_option(pytester, monkeypatch, capacity, options, found):
    names = collected(pytester, monkeypatch, "-m", "extended or not extended", *options, capacity=capacity)
    swept = [name.replace("test_all[cpu-", "").replace("test_beyond[cpu-", "beyond ")[:-1] for name in names]
    mesh = "dp8" if "--perf-scale=full" in options else "dp3"
    assert [*found, "test_pair[cpu-ws2", f"test_meshes[cpu-{mesh}"] == swept


@pytest.mark.parametrize(
    ("capacity", "options", "found"),
    [
        (None, ["-m", "extended or not extended"], [2]),
        (24, [], [2]),  # what is more is extended at the small scale
        (24, ["-m", "extended or not extended"], [2, 24]),
        (2, ["--perf-scale=full"], [2, 4]),
        (6, ["--perf-scale=full"], [2, 4, 6]),
        (300, ["--perf-scale=full"], [2, 4, 300]),
        (24, ["--perf-scale=full", "--perf-world-sizes=8,16"], [8, 16]),
        (None, ["--perf-world-sizes=8,16"], [8, 16]),  # what is asked for is not left out
    ],
)
def test_whole_adds_all_ranks_alone(pytester, monkeypatch, capacity, options, found):
    names = collected(pytester, monkeypatch, *options, capacity=capacity, tests=WHOLE)
    assert [f"test_whole[cpu-ws{count}]" for count in found] == names


def test_whole_is_a_makers_host_where_the_platform_is_not_here(pytester, monkeypatch):
    names = collected(pytester, monkeypatch, "-k", "s4000 or rtx4090", tests=WHOLE)
    assert [f"s4000-ws{count}" for count in (2, 4, 8)] + [f"rtx4090-ws{count}" for count in (2, 4)] == [
        name.removeprefix("test_whole[").rstrip("]") for name in names
    ]


def test_further_ones_are_extended_where_any_is(pytester, monkeypatch):
    plain = collected(pytester, monkeypatch, "-k", "all and not extended", capacity=16)
    assert ["test_all[cpu-ws2]"] == plain


def test_ranks_that_the_size_says_select_a_case(pytester, monkeypatch):
    assert ["test_meshes[cpu-dp3]"] == collected(pytester, monkeypatch, "-m", "world_size(n=3)")


def test_a_world_size_beyond_the_launch_is_skipped_with_both_figures(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, TESTS)
    found = pytester.inline_run("--perf-world-sizes=2,4", "-k", "test_all", plugins=[Launched(3)])
    passed, skipped, failed = found.listoutcomes()
    told = "Skipped: 4 ranks, but torchrun gave 3; start at least 4, or set fewer by --perf-world-sizes"
    assert (len(passed), len(failed), [report.longrepr[2] for report in skipped]) == (1, 0, [told])
    assert [job.world_size for job in repo.driver.jobs] == [2]


@pytest.mark.parametrize("written", ["0", "8,", "two", "-2", "2.5"])
def test_a_world_size_that_is_none_ends_the_run(pytester, monkeypatch, written):
    done = repository(pytester, monkeypatch, TESTS).run(f"--perf-world-sizes={written}")
    done.stderr.fnmatch_lines(["*--perf-world-sizes: '*' in * is not a number of ranks; write whole numbers*"])
