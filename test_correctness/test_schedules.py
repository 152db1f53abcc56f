"""Pipeline schedules: orders are complete and can run, equal torch's where torch's is right, refuse wrong counts."""

import doctest
import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    balance,
    check_counts,
    check_layers,
    make_schedule,
    split_costs,
    stages_of,
)
from perfsuite.schedules.schedule import LETTERS
from perfsuite.workloads.training.train_step import TrainStep


def legal(name, ranks, num_micro_batches, stages_per_rank):
    spec = SCHEDULES[name]
    most = spec.most_stages_per_rank or stages_per_rank
    return spec.fewest_stages_per_rank <= stages_per_rank <= most and spec.legal_count(ranks, num_micro_batches)


def all_legal(ranks, counts, stages):
    for name in SCHEDULES:
        for p, m, v in itertools.product(ranks, counts, stages):
            if legal(name, p, m, v):
                yield name, p, m, v


def words(order):
    return [str(action) for action in order]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_runs_every_micro_batch_once_on_its_rank_and_the_orders_can_end(name):
    for each, p, m, v in all_legal(range(1, 7), range(1, 14), range(1, 4)):
        if each != name:
            continue
        schedule = make_schedule(name, ranks=p, num_micro_batches=m, stages_per_rank=v)
        ran = Counter()
        for rank, order in enumerate(schedule.orders):
            for action in order:
                assert schedule.rank_of_stage[action.stage] == rank
                halves = ["backward_input", "backward_weight"] if action.kind == "backward" else [action.kind]
                ran.update((half, action.stage, action.micro_batch) for half in halves)
        halves = ("forward", "backward_input", "backward_weight")
        assert ran == Counter(itertools.product(halves, range(p * v), range(m)))
        assert len(schedule.orders) == p


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_schedules_that_say_so_split_the_backward(name):
    spec = SCHEDULES[name]
    schedule = make_schedule(name, ranks=3, num_micro_batches=6)
    kinds = {action.kind for order in schedule.orders for action in order}
    assert ("backward_weight" in kinds) == spec.splits_backward


def test_stages_lie_in_a_loop_or_in_a_v():
    assert [stages_of(rank, ranks=3, stages_per_rank=2, placement="loop") for rank in range(3)] == [
        (0, 3),
        (1, 4),
        (2, 5),
    ]
    assert [stages_of(rank, ranks=3, stages_per_rank=2, placement="v") for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert make_schedule("zbv", ranks=3, num_micro_batches=4).rank_of_stage == (0, 1, 2, 2, 1, 0)
    assert make_schedule("looped_bfs", ranks=3, num_micro_batches=4).rank_of_stage == (0, 1, 2, 0, 1, 2)


def test_orders_of_small_pipelines_as_the_papers_draw_them():
    def orders(name, **counts):
        return [" ".join(words(order)) for order in make_schedule(name, **counts).orders]

    assert orders("naive", ranks=2, num_micro_batches=2) == ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]
    assert orders("gpipe", ranks=2, num_micro_batches=2) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert orders("1f1b", ranks=3, num_micro_batches=3) == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1B0 1F2 1B1 1B2",
        "2F0 2B0 2F1 2B1 2F2 2B2",
    ]
    assert orders("interleaved_1f1b", ranks=2, num_micro_batches=2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert orders("looped_bfs", ranks=2, num_micro_batches=2) == [
        "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0",
        "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0",
    ]
    assert orders("zbv", ranks=1, num_micro_batches=2) == ["0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"]


def require_todays_schedules():
    """Skip under a torch whose schedule classes cannot be made from bare stages, as 2.5.0's and 2.7.1's."""
    from importlib.metadata import version

    if [int(part) for part in version("torch").split(".")[:2]] < [2, 8]:
        pytest.skip(f"torch {version('torch')} makes its schedules from whole stages only; compared with newer ones")


TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def torch_orders(name, ranks, num_micro_batches, stages_per_rank):
    """torch's own orders, computations only, as ours are printed; made without any process group."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    import torch

    spec, count = SCHEDULES[name], ranks * stages_per_rank
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=count,
            group_size=ranks,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == count - 1,
            submod=torch.nn.Identity(),
            has_backward=True,
        )
        for stage in stages_of(0, ranks=ranks, stages_per_rank=stages_per_rank, placement=spec.placement)
    ]
    kind = pipelining.get_schedule_class(TORCH_NAMES[name])
    single = issubclass(kind, pipelining.PipelineScheduleSingle)
    made = kind(stages[0] if single else stages, num_micro_batches, loss_fn=lambda output, target: output)
    return [
        [word for action in made.pipeline_order[rank] if action is not None for word in torch_words(action)]
        for rank in range(ranks)
    ]


def torch_words(action):
    """An action of torch as ours are printed, the parts of an overlapped one joined; none for what computes nothing."""
    parts = action.sub_actions or (action,)
    words = [f"{part.stage_index}{part.computation_type.value}{part.microbatch_index}" for part in parts]
    if not {str(part.computation_type.value) for part in parts} <= set(LETTERS.values()):
        return []
    return [*(f"{word}+" for word in words[:-1]), words[-1]]


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_orders_equal_those_of_torch(name):
    require_todays_schedules()
    compared = 0
    for each, p, m, v in all_legal(range(1, 6), range(1, 13), range(1, 4)):
        if each != name or (name == "1f1b" and m < p):  # torch's 1F1B refuses fewer micro-batches than stages
            continue
        ours = [words(order) for order in make_schedule(name, ranks=p, num_micro_batches=m, stages_per_rank=v).orders]
        theirs = torch_orders(name, p, m, v)
        if name == "1f1b" and f"{p - 1}F0" not in theirs[-1]:  # torch 2.13 forgets micro-batch 0 in what it prints
            ours, theirs = ours[:-1], theirs[:-1]
        assert ours == theirs, (p, m, v)
        compared += 1
    assert compared >= 20


GOOD = make_schedule("1f1b", ranks=2, num_micro_batches=2)


def broken(rank, order):
    orders = list(GOOD.orders)
    orders[rank] = tuple(order)
    return replace(GOOD, orders=tuple(orders))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda order: order[:-1], "stage 0 on rank 0 runs only forward of micro-batch 1"),
        (lambda order: (*order, order[0]), "0F0 on rank 0 comes after backward, forward"),
        (lambda order: (order[2], *order[:2], order[3]), "0B0 on rank 0 comes after nothing"),
        (lambda order: (replace(order[0], stage=1), *order[1:]), "1F0 on rank 0, which has stages 0 and micro-batches"),
        (lambda order: (*order[:-1], replace(order[-1], joined=True)), "0B1+ is joined with no next action"),
        (lambda order: (*order[:-1], replace(order[-1], kind="backward_input")), "runs only backward_input, forward"),
        (lambda order: (*order[:-1], replace(order[-1], kind="backward_weight")), "0W1 on rank 0 comes after forward"),
    ],
)
def test_a_broken_order_is_refused_by_what_is_wrong(change, message):
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        broken(0, change(GOOD.orders[0]))


def test_orders_that_wait_for_each_other_for_ever_are_named_rank_by_rank():
    naive = make_schedule("naive", ranks=2, num_micro_batches=2)
    crossed = tuple(Action(kind=kind, stage=1, micro_batch=b) for b in (1, 0) for kind in ("forward", "backward"))
    with pytest.raises(InvalidParameter, match=r"never end: rank 0 at 0B0, rank 1 at 1F1; .* reorder them"):
        replace(naive, orders=(naive.orders[0], crossed))
    with pytest.raises(InvalidParameter, match="1 orders for 2 ranks"):
        replace(naive, orders=naive.orders[:1])


@pytest.mark.parametrize(
    ("name", "counts", "message"),
    [
        ("2f2b", {}, "schedule='2f2b' is unknown; choose naive, gpipe, 1f1b, .* or dualpipev"),
        ("1f1b", {"ranks": 0}, "ranks=0 .* at least 1 rank"),
        ("1f1b", {"stages_per_rank": 2}, "stages_per_rank=2 .* choose 1, or another schedule"),
        ("interleaved_1f1b", {"stages_per_rank": 1}, "stages_per_rank=1 .* choose at least 2"),
        ("zbv", {"stages_per_rank": 3}, "stages_per_rank=3 .* choose 2, or"),
        ("interleaved_1f1b", {"num_micro_batches": 9}, "num_micro_batches=9 with 4 ranks .* choose 8 or 10"),
        ("interleaved_zero_bubble", {"num_micro_batches": 13}, "num_micro_batches=13 .* choose 12 or 15"),
        ("dualpipev", {"num_micro_batches": 7}, "num_micro_batches=7 .* at least 2 x ranks.* choose 8$"),
        ("gpipe", {"num_micro_batches": 0}, "num_micro_batches=0 .* choose 1$"),
    ],
)
def test_wrong_counts_name_the_legal_choices(name, counts, message):
    given_counts = {"ranks": 4, "num_micro_batches": 8, "stages_per_rank": None, **counts}
    with pytest.raises(InvalidParameter, match=message):
        make_schedule(name, **given_counts)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 9), st.integers(-1, 40), st.integers(0, 4))
def test_what_an_error_offers_is_legal(name, ranks, num_micro_batches, stages_per_rank):
    try:
        check_counts(name, ranks=ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank)
    except InvalidParameter as error:
        assert not legal(name, ranks, num_micro_batches, stages_per_rank)
        if "num_micro_batches=" in str(error):
            for offered in re.findall(r"\d+", str(error).rsplit("choose", 1)[1]):
                check_counts(name, ranks=ranks, num_micro_batches=int(offered), stages_per_rank=stages_per_rank)
    else:
        assert legal(name, ranks, num_micro_batches, stages_per_rank)


def test_layers_that_do_not_split_name_what_does():
    check_layers(8, 8)
    with pytest.raises(InvalidParameter, match=r"16 stages for num_layers=12: .* choose 1 to 12 stages"):
        check_layers(12, 16)
    with pytest.raises(InvalidParameter, match="3 stages for num_layers=2"):
        balance([1, 1], 3)
    with pytest.raises(InvalidParameter, match="a cost is at least 0"):
        balance([1, 1], 2, head=-1)


def every_split(layers, stages):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(range(first, end) for first, end in itertools.pairwise((0, *cuts, layers)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 12), st.integers(0, 12))
def test_balance_is_the_best_of_all_splits_and_the_most_even_of_those(costs, stages, embedding, head):
    stages = min(stages, len(costs))
    split = balance(costs, stages, embedding=embedding, head=head)
    assert [layer for layers in split for layer in layers] == list(range(len(costs)))
    assert all(split)
    assert len(split) == stages

    def rank_of(each):
        loads = split_costs(costs, each, embedding=embedding, head=head)
        return max(loads), sum(load * load for load in loads), [layers.stop for layers in each]

    assert split == min(every_split(len(costs), stages), key=rank_of)


def test_a_plan_and_the_closed_forms_of_all_its_ranks_make_one_schedule_and_one_split(monkeypatch):
    made, cut = [], []
    monkeypatch.setattr(Schedule, "walk", lambda schedule, seconds: made.append(schedule))
    monkeypatch.setattr(
        "perfsuite.strategies.hybrid_sizes.balance",
        lambda *given, **more: cut.append(balance(*given, **more)) or cut[-1],
    )
    step = TrainStep(model="gpt3-175b", strategy="hybrid", mesh="pp16", accumulation=29)
    shape = MeshShape.parse(step.mesh)
    plan = step.plan(shape)
    forms = [step.find_strategy().traffic(plan, shape, rank) for rank in range(16)]
    assert len(made) <= 1
    assert len(cut) <= 1
    assert [len(form) for form in forms] == [2] * 16


def test_embedding_and_head_take_layers_from_their_stages():
    even = balance([1.0] * 16, 4)
    assert [len(layers) for layers in even] == [4, 4, 4, 4]
    assert [len(layers) for layers in balance([1.0] * 16, 4, embedding=1, head=3)] == [4, 5, 5, 2]
    assert split_costs([1.0] * 16, balance([1.0] * 16, 4, embedding=1, head=3), embedding=1, head=3) == (5, 5, 5, 5)


def test_the_examples_of_the_documentation_give_what_they_show():
    results = doctest.testfile(
        str(Path(__file__).parent.parent / "docs" / "reference" / "schedules.md"), module_relative=False
    )
    assert results.attempted >= 10
    assert results.failed == 0
