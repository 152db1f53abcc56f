"""The parts that the gate's decisions are made of: quantiles, robust means, levels, yardsticks, session effects."""

import dataclasses
import importlib.util
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.gate.judge import Judge
from perfsuite.gate.noise import (
    FLOOR,
    History,
    Level,
    helpful_slope,
    levels,
    prior_weight,
    priors,
    session_effects,
    slopes,
)
from perfsuite.gate.shift import Bounds, Seen, Shares, Today, look, own_inside, shares
from perfsuite.record.verdict import GateSettings
from perfsuite.statistics.robust import (
    clipped_variance,
    huber_mean,
    median,
    rough_sigma,
    t_cdf,
    t_quantile,
    variance,
    without_spike,
)

values_lists = st.lists(st.floats(-1, 1), min_size=2, max_size=12)


@pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="scipy is the oracle where it is installed")
@given(st.floats(0.001, 0.9999), st.integers(1, 200))
def test_student_quantiles_are_those_of_scipy(probability, dof):
    from scipy.stats import t

    assert t_quantile(probability, dof) == pytest.approx(t.ppf(probability, dof), rel=1e-8, abs=1e-9)


@given(st.floats(0.0005, 0.9995), st.integers(1, 300))
def test_quantile_and_distribution_are_inverse(probability, dof):
    assert t_cdf(t_quantile(probability, dof), dof) == pytest.approx(probability, abs=1e-9)


@given(st.floats(0.51, 0.999), st.integers(1, 100))
def test_quantiles_fall_towards_those_of_the_normal_distribution(probability, dof):
    assert t_quantile(probability, dof) >= t_quantile(probability, dof + 1)
    assert t_quantile(probability, dof) >= statistics.NormalDist().inv_cdf(probability)


@given(values_lists)
def test_median_and_variance_are_those_of_the_standard_library(values):
    assert median(values) == statistics.median(values)
    assert variance(values) == pytest.approx(statistics.variance(values), abs=1e-12)


@given(values_lists, st.floats(0.001, 1))
def test_a_clipped_mean_stays_near_the_median_and_a_clipped_variance_is_no_larger(values, sigma):
    assert abs(huber_mean(values, sigma) - median(values)) <= 2 * sigma + 1e-12
    assert clipped_variance(values, sigma) <= variance(values) + 1e-12


@given(st.lists(st.floats(-0.01, 0.01), min_size=5, max_size=11), st.floats(0.5, 5))
def test_one_spike_changes_neither_spread_nor_level(values, spike):
    calm = rough_sigma([*values, 0.0])
    assert rough_sigma([*values, spike]) <= 1.2 * math.sqrt(variance(values)) + 1e-12
    assert without_spike([*values, spike], max(calm, 0.001)) == values


SESSIONS = tuple(f"s{index}" for index in range(8))


def test_two_speeds_are_no_spikes():
    values = [0.0, 0.0, 0.0, 0.0, 0.05, 0.05, 0.05]
    assert without_spike(values, rough_sigma(values)) == values
    assert rough_sigma(values) > 0.02


def drawn(seed, *, cases=40, drift=0.03, yard_share=0.0):
    """Histories of equally noisy cases whose host drifts from session to session."""
    rng = random.Random(seed)
    moved = [rng.gauss(0, drift) for _ in SESSIONS]
    found = []
    for case in range(cases):
        common, own = ([rng.gauss(0, 0.01) for _ in SESSIONS] for _ in range(2))
        weights = math.sqrt(yard_share), math.sqrt(1 - yard_share)
        shares = [weights[0] * one + weights[1] * other for one, other in zip(common, own, strict=True)]
        values = tuple(math.log(1 + case) + host + share for host, share in zip(moved, shares, strict=True))
        yards = tuple(host + one for host, one in zip(moved, common, strict=True)) if yard_share else ()
        found.append(History(kind=f"kind {case % 4}", sessions=SESSIONS, values=values, yardsticks=yards))
    return found, moved


def test_a_session_that_moved_every_case_is_taken_out():
    histories, moved = drawn(1)
    effects = session_effects(histories, [history.values for history in histories], 20)
    middle = statistics.median(moved)
    for index, true in enumerate(moved):
        assert effects[f"s{index}"] == pytest.approx(true - middle, abs=0.006)
    freed = levels(histories, min_suite=20)
    alone = levels(histories, min_suite=math.inf)
    assert statistics.median(level.sigma for level in freed) == pytest.approx(0.01, rel=0.2)
    assert statistics.median(level.sigma for level in alone) > 0.02
    assert [level.sessions for level in freed] == [8] * 40


def test_too_few_cases_tell_nothing_of_the_host():
    histories, _ = drawn(2, cases=8)
    assert session_effects(histories, [history.values for history in histories], 20) == {}


def test_several_runs_of_one_session_count_once():
    rng = random.Random(3)
    shifts, sessions = (0.0, 0.0, 0.1, 0.1), ("a", "a", "b", "b")
    draws = [tuple(shift + rng.gauss(0, 0.001) for shift in shifts) for _ in range(20)]
    histories = [History(kind="k", sessions=sessions, values=values) for values in draws]
    effects = session_effects(histories, [history.values for history in histories], 20)
    assert effects["b"] - effects["a"] == pytest.approx(0.1, abs=0.002)
    assert levels(histories, min_suite=20)[0].sessions == 2


def test_a_yardstick_is_used_where_it_helps_and_only_there():
    helping = levels(drawn(4, yard_share=0.8)[0], min_suite=20)
    assert statistics.median(level.slope for level in helping) == pytest.approx(0.9, abs=0.15)
    assert statistics.median(level.sigma for level in helping) < 0.007
    useless = levels(drawn(5, yard_share=0.05)[0], min_suite=20)
    assert {level.slope for level in useless} == {0.0}
    ignored = levels(drawn(4, yard_share=0.8)[0], min_suite=20, use_yardstick=False)
    assert {level.slope for level in ignored} == {0.0}


def test_useless_yardsticks_are_hardly_ever_adopted_by_chance():
    rng = random.Random(6)
    adopted = sum(helpful_slope([(rng.gauss(0, 0.01), rng.gauss(0, 0.01)) for _ in range(20)]) > 0 for _ in range(400))
    assert adopted / 400 < 0.08


def test_few_runs_adopt_a_yardstick_only_where_it_explains_nearly_all():
    rng = random.Random(11)

    def series(own):
        yards = [rng.gauss(0, 0.1) for _ in range(8)]
        return [("kind", [yard + rng.gauss(0, 0.01) if own else rng.gauss(0, 0.1) for yard in yards], yards)]

    assert sum(bool(slopes(series(own=False))) for _ in range(400)) <= 8
    assert sum(bool(slopes(series(own=True))) for _ in range(100)) >= 85
    assert slopes([("kind", [0.1, 0.2, 0.3], [0.1, 0.2, 0.3])]) == {}


@given(st.floats(-3, 3), st.lists(st.floats(-0.1, 0.1), min_size=3, max_size=12))
def test_a_value_and_its_yardstick_move_together(slope, yards):
    points = [(yard, slope * yard) for yard in yards if abs(yard) > 1e-6]
    if len(points) >= 3:
        assert helpful_slope(points) == pytest.approx(min(1.5, slope) if 1e-9 < slope < 2.2 else 0.0, abs=1e-6) or (
            slope >= 1.5 or 0 <= slope <= 1e-9
        )


def test_a_new_value_needs_the_yardstick_that_its_level_was_adjusted_by():
    level = Level(centre=0.0, sigma=0.01, dof=7, runs=8, sessions=8, slope=0.5)
    assert level.adjusted(1.0, 0.4, 0.1) == pytest.approx(0.85)
    assert level.adjusted(1.0, None, 0.0) is None
    assert Level(centre=0.0, sigma=0.01, dof=7, runs=8, sessions=8).adjusted(1.0, None, 0.0) == 1.0


def test_the_noise_of_a_case_is_pulled_towards_its_kind_and_never_below_the_floor():
    histories, _ = drawn(7, drift=0.0)
    flat = History(kind="kind 0", sessions=histories[0].sessions, values=(1.0,) * 8)
    found = levels([*histories, flat], min_suite=20)
    assert FLOOR < found[-1].sigma < 0.01
    assert levels([flat], min_suite=20)[0].sigma == FLOOR
    assert levels([], min_suite=20) == ()


def test_alike_cases_lend_each_other_more_than_unlike_ones():
    rng = random.Random(8)

    def drawn_variances(spread):
        return [(math.exp(rng.gauss(0, spread)) * variance([rng.gauss(0, 1) for _ in range(8)]), 7) for _ in range(60)]

    assert prior_weight([drawn_variances(0.0)]) == 10
    assert 1 <= prior_weight([drawn_variances(1.5)]) <= 3
    assert priors([("k", member) for member in drawn_variances(0.0)])["k"][0] == pytest.approx(1.0, rel=0.25)
    assert priors([("k", (0.5, 7))])["k"][1] == 0
    assert priors([("a", (0.5, 7)), ("b", (0.6, 7))])["a"]


# -- the session -----------------------------------------------------------------------------------------------------


LEVEL = Level(centre=0.0, sigma=0.01, dof=17, runs=8, sessions=8)


def of_noise(sigma, **changes):
    return dataclasses.replace(LEVEL, sigma=sigma, **changes)


def screened(seed, shift=0.0, sigma=0.01):
    rng = random.Random(seed)
    return [Seen(kind="k", level=LEVEL, values=(shift + rng.gauss(0, sigma),)) for _ in range(100)]


def test_shift_and_noise_of_a_session_are_seen_in_its_cases():
    today, found = look(screened(1, shift=0.05), Shares(), GateSettings(), explained=False)
    assert today.is_known
    assert today.shift == pytest.approx(0.05, abs=0.005)
    assert today.unexplained == today.shift
    assert today.shift_variance > (0.3 * today.shift) ** 2, "cases feel a host differently"
    assert found == Shares()
    _, noisy = look(screened(2, sigma=0.03), Shares(), GateSettings(), explained=False)
    assert noisy.usual == pytest.approx(9.0, rel=0.5)


def test_a_shift_that_the_yardsticks_explain_is_the_hosts():
    assert look(screened(3, shift=0.05), Shares(), GateSettings(), explained=True)[0].unexplained == 0.0
    assert look(screened(3, shift=-0.05), Shares(), GateSettings(), explained=False)[0].unexplained == 0.0


def test_few_cases_or_cases_in_place_tell_no_shift():
    assert look(screened(4, shift=0.05)[:7], Shares(), GateSettings(), explained=False)[0] == Today()
    assert look(screened(4, shift=0.05), Shares(), GateSettings(in_place=True), explained=False)[0] == Today()


def test_replicates_tell_noise_inside_from_noise_between_sessions():
    rng = random.Random(5)

    def replicates(sigma):
        return [Seen(kind="k", level=LEVEL, values=[rng.gauss(0, sigma) for _ in range(4)]) for _ in range(100)]

    quiet = shares(replicates(0.005), with_shift=True)
    assert quiet.between == pytest.approx(0.7, abs=0.1)
    assert quiet.of("k") == pytest.approx(0.3, abs=0.1)
    loud = shares(replicates(0.02), with_shift=True)
    assert loud.between == 0.1
    assert loud.of("k") == pytest.approx(4.0, rel=0.3)
    assert shares([], with_shift=False).between == 0.5
    own = Seen(kind="k", level=LEVEL, values=[0.0, 0.05, -0.05, 0.02])
    assert own_inside(0.9, own, 1.0) > 1.5
    assert own_inside(0.9, Seen(kind="k", level=LEVEL, values=[0.0, 0.0001]), 1.0) == 0.9


def judge_of(level=LEVEL, **changes):
    bounds = Bounds(tolerance=math.log1p(0.03), limit=math.log1p(0.10), alpha=0.005, shared_alpha=0.005 / 20)
    return Judge(level=level, today=Today(is_known=True), bounds=bounds, settings=GateSettings(**changes))


def test_runs_of_one_session_do_not_shrink_what_lies_between_sessions():
    judge = judge_of()
    errors = [judge.spread(runs)[0] for runs in (1, 4, 12, 10_000)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == pytest.approx(judge.spread(1)[1], rel=1e-3)
    few = of_noise(0.001, sessions=1)
    assert judge_of(few).spread(12)[0] > 0.01
    assert judge_of(few, can_run_base=True).spread(12)[0] < 0.002


def test_the_smallest_change_that_would_show_grows_with_the_noise():
    mdes = [judge_of(of_noise(sigma)).smallest_shown for sigma in (0.001, 0.01, 0.03, 0.1)]
    assert mdes[0] == math.log1p(0.03)
    assert mdes == sorted(mdes)
    assert mdes[-1] > 0.25


@settings(max_examples=50)
@given(st.floats(0.0005, 0.2), st.floats(-0.5, 0.5), st.integers(1, 12))
def test_a_pass_never_leaves_room_for_a_large_slowdown(sigma, effect, runs):
    judge = judge_of(of_noise(sigma))
    for estimate in (judge.screen([effect] * runs), judge.remeasured([effect] * max(2, runs))):
        if estimate.outcome == "pass":
            assert estimate.effect + t_quantile(0.999, 17) * estimate.error < math.log1p(0.10)


def test_intervals_of_an_a_b_hold_the_truth_as_often_as_they_say():
    rng = random.Random(9)
    judge = judge_of(can_run_base=True)
    held = 0
    for _ in range(600):
        pairs = [(rng.gauss(0, 0.01), rng.gauss(0.05, 0.01)) for _ in range(6)]
        low, high = judge.paired(pairs).interval()
        held += low <= 0.05 <= high
    assert 0.93 <= held / 600 <= 0.985


def lone(sigma):
    """The judge of a case that no others tell the host's movements of, with a base to run."""
    judge = judge_of(of_noise(sigma, dof=7), can_run_base=True)
    return dataclasses.replace(judge, today=Today(), between=0.5, inside=0.5)


def test_one_disturbed_pair_does_not_hide_what_the_others_show():
    differences = [0.045, 0.055] * 5 + [0.05, 0.9]
    judge = lone(0.05)
    assert judge.paired([(0.0, value) for value in differences]).outcome == "regressed"
    assert judge.paired([(0.0, value - 0.05) for value in differences]).outcome != "regressed"
    assert lone(0.1).arms_tell([0.0, 0.004, 0.008, 0.6])
    assert not lone(0.1).arms_tell([0.0, 0.3, -0.3, 0.6])


def test_an_a_b_that_nothing_suspected_is_as_sure_as_many_looks_at_it_ask_for():
    judge = lone(0.05)
    told = [judge.is_sure(judge.paired([(0.0, mean + away) for away in (-0.02, 0.02) * 6])) for mean in (0.032, 0.04)]
    assert told == [False, True], "by chance 1 A/B in 8,000 shows the first, and a lone case has two in every session"


def test_a_gain_of_a_case_that_may_be_as_slow_as_no_pass_allows_is_none():
    judge = lone(0.05)
    judge = dataclasses.replace(judge, bounds=dataclasses.replace(judge.bounds, alpha=0.04, shared_alpha=0.04))
    told = [judge.remeasured([gain + away for away in (-0.01, 0.01) * 6]).outcome for gain in (-0.15, -0.30)]
    assert told == ["inconclusive", "improved"]


def test_a_lone_case_is_asked_of_24_pairs_which_have_to_show_all_of_the_tolerance():
    assert [True, False] == [lone(sigma).arms_tell([0.0]) for sigma in (0.06, 0.08)]
    nearly = [(0.0, 0.028 + away) for away in (-0.0005, 0.0005) * 6]
    assert lone(0.002).paired(nearly).outcome != "regressed"
    assert judge_of(can_run_base=True).paired(nearly).outcome == "regressed"


def test_looking_faster_makes_no_pass_and_other_cases_tell_a_lone_one_nothing():
    judge = lone(0.02)
    asked = ((0, 0.012), (0, 0.017), (-1, 0.017))
    assert [True, False, False] == [judge.excludes(effect, error) for effect, error in asked]
    borrowed = dataclasses.replace(judge, level=dataclasses.replace(judge.level, dof=17))
    assert (borrowed.dof, dataclasses.replace(borrowed, today=Today(is_known=True)).dof) == (7, 17)


def test_runs_inside_the_session_tell_how_far_sessions_lie_apart_unless_the_host_drifts_much_more():
    judge, away = lone(0.02), [-0.0126, 0.0126] * 8
    assert judge.is_surely_worse([0.105 + value for value in away], expected=False)
    assert not judge.is_surely_worse([0.105 + value / 6 for value in away], expected=False)
    assert not judge.is_surely_worse([0.105 + value * 3 for value in away], expected=False)


def test_stored_runs_that_lie_closer_together_than_runs_of_today_show_no_drift():
    judge, scattered = lone(0.005), [0.02, 0.08, 0.05, 0.01, 0.09, 0.05] * 3
    assert not judge.is_surely_worse(scattered, expected=False)
    assert judge.is_surely_worse([0.05 + 0.05 * (value - 0.05) for value in scattered], expected=False)


def test_a_case_of_a_large_suite_may_err_less_often_where_nothing_is_known_to_have_changed():
    judge, away = lone(0.02), [-0.0126, 0.0126] * 8
    many = dataclasses.replace(judge, bounds=dataclasses.replace(judge.bounds, shared_alpha=0.05 / 600))
    values = [0.105 + value for value in away]
    asked = ((judge, False), (many, False), (many, True))
    assert [True, False, True] == [one.is_surely_worse(values, expected=expected) for one, expected in asked]
