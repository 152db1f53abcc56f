"""Data sets on disk: what is generated is what is read, every damage is named, loaders give each rank its samples."""

import json
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base.errors import InvalidParameter
from perfsuite.models import find
from perfsuite.models.dataset import generate, read
from perfsuite.models.loading import Files, Rows, Synthetic, numbers_of, synthetic_batch

CPU = torch.device("cpu")
TOKENS = find("gpt2-tiny").twin()
VIDEO = find("opensora-tiny").twin()


def test_generated_tokens_are_read_back(tmp_path):
    dataset = generate(TOKENS, tmp_path / "set", samples=5)
    rows = Rows(TOKENS, dataset)
    sample = rows[3]["tokens"]
    assert sample.shape == (TOKENS.tokens_per_sample + 1,)
    assert sample.dtype == torch.int64
    assert 0 <= int(sample.min()) <= int(sample.max()) < TOKENS.words
    assert torch.equal(rows[8]["tokens"], sample)  # sample 8 of 5 is sample 3 again
    assert not torch.equal(rows[4]["tokens"], sample)


def test_generated_videos_have_what_the_model_takes(tmp_path):
    dataset = generate(VIDEO, tmp_path / "set", samples=20)
    sample = Rows(VIDEO, dataset)[0]
    assert {name: tuple(values.shape) for name, values in sample.items()} == {p.name: p.shape for p in VIDEO.parts}
    assert sample["latents"].dtype == torch.float32
    assert {table.name: table.rows for table in dataset.tables} == {"latents": 20, "caption": 16}


def test_an_existing_set_is_kept_and_another_size_replaces_it(tmp_path):
    first = generate(TOKENS, tmp_path / "set", samples=5)
    file = first.directory / "tokens.bin"
    written = file.stat().st_mtime_ns
    generate(TOKENS, tmp_path / "set", samples=5)
    assert file.stat().st_mtime_ns == written
    assert generate(TOKENS, tmp_path / "set", samples=6).samples == 6
    assert [each.name for each in tmp_path.iterdir()] == ["set"]


def test_writers_at_once_leave_one_whole_set(tmp_path):
    problems = []

    def write():
        try:
            generate(TOKENS, tmp_path / "set", samples=50)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=write) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert read(tmp_path / "set", TOKENS).samples == 50
    assert [each.name for each in tmp_path.iterdir()] == ["set"]


def cut_short(directory):
    with open(directory / "tokens.bin", "r+b") as file:
        file.truncate(100)


def edit(directory, **changes):
    index = json.loads((directory / "dataset.json").read_text())
    index.update({name: value for name, value in changes.items() if name == "samples"})
    index["parts"][0].update({name: value for name, value in changes.items() if name != "samples"})
    (directory / "dataset.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, r"tokens.bin has 100 bytes, but 5 rows of 34 bytes are 170; copy it again"),
        (lambda d: (d / "tokens.bin").unlink(), r"tokens.bin is missing, but 5 rows of 34 bytes are 170"),
        (lambda d: (d / "dataset.json").unlink(), r"dataset.json cannot be read: No such file"),
        (lambda d: (d / "dataset.json").write_text("{"), r"dataset.json is damaged"),
        (lambda d: (d / "dataset.json").write_text("{}"), r"dataset.json is damaged"),
        (lambda d: edit(d, samples=0), r"samples=0 is below 1"),
        (lambda d: edit(d, name="words"), r"has no part 'tokens', which model gpt2-tiny needs; it has words"),
        (lambda d: edit(d, shape=[9]), r"rows of tokens have shape \[9\], model gpt2-tiny needs \[17\]"),
        (lambda d: edit(d, dtype="object"), r"part tokens has dtype 'object' and 5 rows; choose one of uint8, uint16"),
        (lambda d: edit(d, rows=0), r"part tokens has dtype 'uint16' and 0 rows"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    generate(TOKENS, tmp_path / "set", samples=5)
    damage(tmp_path / "set")
    with pytest.raises(InvalidParameter, match=message):
        read(tmp_path / "set", TOKENS)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_ranks_share_the_samples_without_gap_or_overlap(ranks, micro_batch_size, batches):
    shares = [numbers_of(replica=rank, replicas=ranks, micro_batch_size=micro_batch_size) for rank in range(ranks)]
    seen = [number for _ in range(batches) for share in shares for number in next(share)]
    assert seen == list(range(ranks * micro_batch_size * batches))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_bring_this_rank_s_samples_in_order(tmp_path, num_workers):
    dataset = generate(VIDEO, tmp_path / "set", samples=7)
    rows = Rows(VIDEO, dataset)
    share = numbers_of(replica=1, replicas=2, micro_batch_size=2)
    batches = Files(VIDEO, dataset, share, CPU, num_workers=num_workers)
    try:
        for numbers in ([2, 3], [6, 7], [10, 11]):
            batch = next(batches)
            for place, number in enumerate(numbers):
                for name, expected in rows[number].items():
                    assert torch.equal(batch[name][place], expected), (name, number)
    finally:
        batches.close()


def test_synthetic_batches_repeat_and_follow_the_sample_numbers():
    share = numbers_of(replica=0, replicas=1, micro_batch_size=2)
    batches = Synthetic(VIDEO, share, CPU)
    taken = [next(batches) for _ in range(5)]
    assert taken[4] is taken[0]
    expected = synthetic_batch(VIDEO, [2, 3])
    assert all(torch.equal(taken[1][name], values) for name, values in expected.items())
