"""Models: published sizes, work as torch counts it, gradients that no checkpointing changes, wrong names."""

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from perfsuite.base.errors import InvalidParameter, UnsupportedCase
from perfsuite.models import MODELS, find
from perfsuite.models.build import build
from perfsuite.models.dit_module import FrozenEncoders, build_encoders
from perfsuite.models.layers import AttentionCore, materialize
from perfsuite.models.loading import synthetic_batch
from perfsuite.models.program import ENCODERS

PUBLISHED = {
    "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328,
    "llama2-13b": 13_015_864_320,
    "latte-l": 457_094_176,
    "latte-xl": 673_994_912,
    "opensora": 759_620_768,
}
SMALL = [name for name in MODELS if name.endswith("tiny")]


def built(model, checkpointing="none", seed=0):
    with torch.device("meta"):
        module = build(model, checkpointing)
    materialize(module, torch.device("cpu"), seed=seed)
    return module


def operations():
    """A counter that knows this torch's kernels of attention and of experts too."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mapping = {kernel: lambda q, k, v, *rest, **named: sdpa_flop_count(q, k, v)}
    if hasattr(torch.ops.aten, "_grouped_mm"):
        mapping[torch.ops.aten._grouped_mm] = lambda rows, weights, *rest, **named: 2 * math.prod(rows) * weights[-1]
    return FlopCounterMode(display=False, custom_mapping=mapping)


@pytest.mark.parametrize("name", MODELS)
def test_the_formula_counts_the_parameters_that_torch_holds(name):
    model = dataclasses.replace(MODELS[name], layers=2)
    with torch.device("meta"):
        module = build(model)
    assert sum(parameter.numel() for parameter in module.parameters()) == model.parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    assert find(name).parameters == PUBLISHED[name]


def test_frozen_encoders_have_their_published_sizes_and_are_counted_apart():
    model, encoders = find("opensora"), ENCODERS["t5xxl-sdvae"]
    with torch.device("meta"):
        module = FrozenEncoders(encoders)
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in module.named_children()}
    assert sizes == {"text": 4_762_310_656, "picture": 34_163_664}
    assert encoders.parameters == sum(sizes.values())
    parts = encoders.inputs(model).parts
    assert [part.name for part in parts] == ["video", "noise", "level", "words"]
    assert parts[0].shape == (3, 16, 256, 256)
    assert [part.name for part in ENCODERS["sdvae"].inputs(model).parts] == ["video", "noise", "level", "caption"]
    assert [part.name for part in ENCODERS["sdvae"].inputs(find("latte-l")).parts] == ["video", "noise", "level"]


def test_sixteen_frames_by_the_picture_encoder_are_half_of_latte_s_forward_again():
    """Source: 16 x 0.273 TFLOP beside the 7.59 of a Latte-L step, whose forward is a third."""
    assert ENCODERS["sdvae"].forward_flops(find("latte-l")) / 1e12 == pytest.approx(4.36, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_encoders_run_without_gradients_and_as_counted(dtype):
    model, config = find("opensora-tiny"), ENCODERS["tiny-text-picture"]
    encoders = build_encoders(config, torch.device("cpu"), dtype, seed=0)
    assert {tensor.dtype for tensor in (*encoders.parameters(), *encoders.buffers())} == {dtype}
    assert not encoders.training
    assert not any(parameter.requires_grad for parameter in encoders.parameters())
    batch = synthetic_batch(config.inputs(model), [0, 1])
    with operations() as counter:
        encoded = encoders(batch)
    assert counter.get_total_flops() == 2 * config.forward_flops(model)
    assert {name: values.shape[1:] for name, values in encoded.items()} == {p.name: p.shape for p in model.parts}
    assert encoded["latents"].dtype == encoded["caption"].dtype == dtype
    assert not any(values.requires_grad for values in encoded.values())
    wide = {name: values.float() if values.is_floating_point() else values for name, values in encoded.items()}
    assert torch.isfinite(built(model)(**wide))


def test_words_know_their_distance_and_direction():
    from perfsuite.models.dit_module import _distance_class

    classes = _distance_class(torch.arange(-200, 201)).tolist()
    at = dict(zip(range(-200, 201), classes, strict=True))
    assert [at[d] for d in (0, -1, -7, 1, 7)] == [0, 1, 7, 17, 23]
    assert at[-200] == at[-128] == 15
    assert at[200] == at[128] == 31
    assert set(classes) == set(range(32)) - {16}  # of no distance there is no direction


def test_a_longer_context_has_more_positions():
    assert find("gpt2-xl", {"context": 2048}).parameters == 1_559_249_600


def test_the_report_s_video_is_4096_tokens():
    assert find("latte-l").tokens_per_sample == find("opensora").tokens_per_sample == 4096


@pytest.mark.parametrize("twin", [False, True], ids=["small", "twin"])
@pytest.mark.parametrize("name", SMALL)
def test_the_work_model_is_what_torch_counts(name, twin):
    model = find(name).twin() if twin else find(name)
    module = built(model)
    with operations() as counter:
        module(**synthetic_batch(model, [0, 1, 2]))
    assert counter.get_total_flops() == 3 * model.forward_flops
    parts = counter.get_flop_counts()
    assert sum(sum(parts[where].values()) for where in parts if is_block(where)) == 3 * model.block_flops


@pytest.mark.parametrize(("name", "attention"), [*((name, "auto") for name in SMALL), ("llama2-tiny", "math")])
def test_selective_checkpointing_runs_no_counted_operation_again(name, attention):
    """Therefore its HFU is its MFU."""
    model = find(name)
    counts = []
    for checkpointing in ("none", "selective", "full"):
        module = build(model, checkpointing, attention)
        with operations() as counter:
            module(**synthetic_batch(model, [0, 1])).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] < counts[2]


def is_block(where):
    return where.partition(".blocks.")[2].isdigit()


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("name", SMALL)
def test_checkpointing_changes_no_gradient(name, checkpointing):
    model = find(name).twin()
    batch = synthetic_batch(model, [0, 1])
    gradients = []
    for kind in ("none", checkpointing):
        module = built(model, kind)
        module(**batch).backward()
        gradients.append({n: p.grad for n, p in module.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for parameter, gradient in gradients[0].items():
        assert gradient is not None
        assert gradient.norm() > 0, parameter
        assert torch.equal(gradient, gradients[1][parameter]), parameter


def test_initial_values_depend_on_the_name_alone():
    model = find("llama2-tiny")
    whole = built(model)
    with torch.device("meta"):
        parts = build(model)
    materialize(parts.blocks["1"], torch.device("cpu"), seed=0, prefix="blocks.1.")
    materialize(parts, torch.device("cpu"), seed=0)
    for (name, one), (_, other) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert not torch.equal(built(model, seed=1).output.weight, whole.output.weight)


def test_rotary_positions_see_distances_only():
    from perfsuite.models.language_module import _turn, rotary_angles

    cosines, sines = rotary_angles(torch.arange(12), 8)
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(i, j):
        turned = [_turn(x, cosines[at : at + 1], sines[at : at + 1]) for x, at in ((query, i), (key, j))]
        return float((turned[0] * turned[1]).sum())

    assert score(3, 1) == pytest.approx(score(9, 7), rel=1e-4, abs=1e-5)
    assert score(3, 1) != pytest.approx(score(3, 2), rel=1e-4, abs=1e-5)


def test_a_causal_model_does_not_see_the_future():
    model = find("llama2-tiny").twin()
    module = built(model)
    hidden = []
    module.norm.register_forward_hook(lambda *_: hidden.append(_[2].detach()))
    tokens = synthetic_batch(model, [0])["tokens"]
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % model.words
    module(tokens)
    module(changed)
    assert torch.equal(hidden[0][0, :10], hidden[1][0, :10])
    assert not torch.equal(hidden[0][0, 10:], hidden[1][0, 10:])


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gpt3", None, "model 'gpt3' is unknown; did you mean .*gpt3-13b"),
        ("gpt2", {"depth": 3}, "model gpt2 has no field depth; choose from .*layers"),
        ("gpt2", {"heads": 7}, "heads=7 does not divide width=768 of model gpt2; choose 3, 4, 6, 8"),
        ("gpt2", {"layers": 0}, "layers=0 of model gpt2 is not valid"),
        ("gpt2", {"sequence_length": 2048}, "sequence_length=2048 does not fit context=1024"),
        ("llama2-7b", {"kv_heads": 5}, "kv_heads=5 does not divide heads=32"),
        ("llama2-7b", {"width": 96}, "width=96 over heads=32 of model llama2-7b is odd"),
        ("latte-l", {"side": 31}, "side=31 of model latte-l is not a multiple of the patch, 2; choose 30 or 32"),
        ("latte-tiny", {"width": 6, "heads": 3}, "width=6 of model latte-tiny is not a multiple of 4"),
        ("opensora", {"caption_length": 0}, "caption_length=0 of model opensora is not valid"),
    ],
)
def test_bad_sizes_name_the_rule(name, overrides, message):
    with pytest.raises(InvalidParameter, match=message):
        find(name, overrides)


# -- attention -----------------------------------------------------------------------------------------------------


def heads(number, length=9):
    return torch.randn(2, number, length, 8, generator=torch.Generator().manual_seed(number))


def plainly(query, key, value):
    """Head by head: neighbouring heads of the query share one of the keys."""
    shared = query.shape[1] // key.shape[1]
    later = torch.ones(query.shape[2], query.shape[2]).triu(1).bool()
    out = torch.empty_like(query)
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // shared].transpose(-1, -2) / query.shape[-1] ** 0.5
        out[:, head] = scores.masked_fill(later, float("-inf")).softmax(-1) @ value[:, head // shared]
    return out


@pytest.mark.parametrize("method", ["auto", "math", "flash"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_every_method_computes_causal_attention(method, key_heads):
    query, key, value = heads(4), heads(key_heads), heads(key_heads).flip(2)
    found = AttentionCore(method)(query, key, value)
    torch.testing.assert_close(plainly(query, key, value), found, rtol=1e-5, atol=1e-6)


def test_a_method_is_the_kernel_of_its_name():
    profiled = {}
    for method in ("math", "flash"):
        with torch.profiler.profile() as profile:
            AttentionCore(method)(heads(2), heads(2), heads(2))
        profiled[method] = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in profiled["flash"] - profiled["math"]
    assert "aten::_scaled_dot_product_attention_math" in profiled["math"] - profiled["flash"]


def test_what_a_device_lacks_is_unsupported():
    there = heads(2).to("meta")  # torch knows no kernels of it and would compute with math, saying nothing
    with pytest.raises(UnsupportedCase, match=r"attention='flash': torch .* on meta .*float32 heads of 8.*choose auto"):
        AttentionCore("flash")(there, there, there)
    assert AttentionCore("math")(there, there, there).shape == there.shape
