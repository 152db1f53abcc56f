"""The search for set-ups that give a printed memory, as a user calls it."""

import pytest

from test_correctness.helpers.command_line import as_json, printed, refused


def test_the_rows_of_report_000_come_out_of_the_recipe_s_set_up_alone(capsys):
    """Printed 21.889, 17.598, 15.445 and 14.395 GiB; the next set-up is far away on some row."""
    first, second, *_ = as_json(capsys, "explain", "000/memory")
    assert first["settings"] == {
        "strategy": "zero1 or zero2",
        "dtype": "bf16",
        "encoders": "t5xxl-sdvae",
        "ema": "fp32",
        "checkpointing": "full",
    }
    assert [round(line["gib"], 2) for line in first["lines"]] == [21.67, 17.42, 15.3, 14.24]
    assert first["largest_error"] < 0.02
    assert second["largest_error"] > 0.05
    assert all(line["residual_gib"] == pytest.approx(line["printed_gib"] - line["gib"]) for line in first["lines"])
    assert first["lines"][0]["parts_gib"]["EMA"] == pytest.approx(2.83, abs=0.01)


def test_report_001_s_memory_is_that_of_wide_weights_with_an_encoder_and_an_ema(capsys):
    """Latte's public train.py, and not the sentence on fp16; the search leaves out what the rows state."""
    setups = as_json(capsys, "explain", "001/latte-l")
    assert {setup["settings"]["strategy"] for setup in setups} == {"ddp"}
    assert {name: setups[0]["settings"][name] for name in ("dtype", "encoders", "ema", "checkpointing")} == {
        "dtype": "fp32", "encoders": "sdvae", "ema": "fp32", "checkpointing": "none",
    }  # fmt: skip


def test_what_is_printed_says_what_is_left_and_marks_the_recipe(capsys):
    lines = printed(capsys, "explain", "000", "--limit", "2").splitlines()
    assert lines[1] == "printed: line 34: 21.89, line 35: 17.6, line 36: 15.45, line 37: 14.39"
    assert lines[2].endswith("21.67 (+0.22), 17.42 (+0.17), 15.3 (+0.14), 14.24 (+0.15)  <- the recipe")
    assert len(lines) == 5
    assert "whole device" not in "".join(lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("007",), "no published report or table is called '007'"),
        (("000/time",), "000/time prints no memory of a training step; choose 000/memory, "),
        (("000/memory", "--limit", "0"), "--limit 0 prints nothing; give a count from 1"),
    ],
)
def test_what_cannot_be_explained_is_one_line(capsys, arguments, said):
    assert said in refused(capsys, "explain", *arguments)
