"""Context parallelism: attention of tokens spread over real ranks is attention of all of them."""

import importlib.util
import re

import pytest

from perfsuite.base.errors import RanksFailed, UnsupportedCase
from perfsuite.record.workload import Budget
from test_correctness.helpers.context_ranks import FaultyAttention, LonelyAttention, SpreadAttention
from test_correctness.helpers.local_driver import WORKER, driver_fixture, records, run

driver = driver_fixture("torch", WORKER)


def errors(driver, cp, **case):
    # DeepSpeed leaves things behind in a process.
    return records(run(driver, SpreadAttention(cp=cp, **case), f"cp{cp}", fresh=case["method"] == "deepspeed"))


WAYS = [("zigzag", "math"), ("zigzag", "flash"), ("ring", "math"), ("ring", "flash"), ("ulysses", "auto")]


@pytest.mark.parametrize("cp", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "attention"), WAYS)
def test_spread_attention_is_attention(driver, method, attention, cp):
    found = errors(driver, cp, method=method, attention=attention)
    assert {"out", "d_query", "d_key", "d_value"} == set(found)
    assert max(found.values()) <= 1e-5


GROUPED = [("zigzag", "math", 2), ("zigzag", "flash", 1), ("ring", "flash", 4), ("ulysses", "flash", 4)]


@pytest.mark.parametrize("cp", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "attention", "key_heads"), GROUPED)
def test_heads_may_share_keys(driver, method, attention, key_heads, cp):
    assert max(errors(driver, cp, method=method, attention=attention, key_heads=key_heads).values()) <= 1e-5


@pytest.mark.parametrize(("method", "attention"), WAYS)
def test_half_precision_is_as_narrow_as_it_is_in_one_process(driver, method, attention):
    found = errors(driver, 4, method=method, attention=attention, key_heads=4, dtype="bf16")
    assert 1e-4 < max(found.values()) <= 2e-2


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4])
def test_deepspeed_s_ulysses_is_attention_too(driver, cp):
    assert max(errors(driver, cp, method="deepspeed", key_heads=4).values()) <= 1e-5


@pytest.mark.parametrize("method", ["zigzag", "ring", "ulysses"])
def test_silence_sends_nothing(driver, method):
    assert {"shaped": 1.0, "ranks": 2.0} == records(run(driver, LonelyAttention(method=method), "cp2"))


@pytest.mark.extended
@pytest.mark.parametrize("fault", ["die", pytest.param("hang", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["zigzag", pytest.param("ulysses", marks=pytest.mark.slow)])
def test_a_rank_lost_in_attention_is_named_and_the_next_case_runs(driver, method, fault):
    assert max(errors(driver, 4, method=method).values()) <= 1e-5  # all that it imports is there
    workload = FaultyAttention(method=method, cp=4, fault=fault)
    limit = Budget(smoke=True, timeout_s=20.0 if fault == "hang" else 120.0)
    with pytest.raises(RanksFailed) as failed:
        run(driver, workload, "cp4", budget=limit)
    report = str(failed.value)
    assert re.match(r"rank 1 \(cp 1\) on \S+ (died: exit code 7|hung at \S+ in misbehave)", report)
    if fault == "hang":
        assert re.search(
            r"rank 0 \(cp 0\) on \S+ was waiting for the other ranks in \w+, called at \S+ in _?wait_along_cp", report
        )
    assert max(errors(driver, 4, method=method).values()) <= 1e-5


@pytest.mark.parametrize(
    ("attention", "why"),
    [("auto", "Operator .*"), ("math", "attention='math' has no fused kernel here")],
)
def test_what_torch_cannot_spread_is_unsupported(driver, attention, why):
    older = "cannot spread a single module"  # 2.5 has no way to spread one module
    message = rf"context='torch': torch \S+ (cannot spread attention on cpu \({why}\)|{older}); choose zigzag or ring"
    with pytest.raises(UnsupportedCase, match=message):
        errors(driver, 2, method="torch", attention=attention)
