"""config.json files as models: parameters as published, operations as torch counts them, one line for damaged files."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite import workloads
from perfsuite.base.errors import ConfigurationError, InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.cli.main import TRACEBACK, main
from perfsuite.models import MODELS, PROJECTED, find, find_projected, stated, trained_like
from perfsuite.models.decoder import Decoder
from perfsuite.models.huggingface import FAMILIES, read_config
from perfsuite.platforms import load_catalog
from perfsuite.projection import operations
from perfsuite.projection.advisor import case_of
from perfsuite.projection.architecture import Architecture
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.implementation import Implementation
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.layout import Layout
from perfsuite.projection.step import project
from perfsuite.record.step import Training
from perfsuite.workloads.training.parity import TrainParity
from test_correctness.helpers.command_line import as_json, printed, refused
from test_correctness.test_projection_terms import products, scores

SAMPLES = Path(__file__).parent / "huggingface"
PUBLISHED = {row["model"]: row for row in json.loads((SAMPLES / "published.json").read_text())}
SMALL = {row["config"]["model_type"]: row for row in json.loads((SAMPLES / "small.json").read_text())}
LAYOUTS = ("dp8", "dp4-tp2", "tp8", "pp2-dp4", "dp2-cp4", "dp2-ep4")
SIZES = ("--platform", "h100", "--world", "8", "--global-batch", "8")


def read(folder, config) -> Decoder:
    text = config if isinstance(config, str | bytes) else json.dumps(config)
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_config(folder / "config.json")


def changed(model, **changes):
    config = {**PUBLISHED[model]["config"], **changes}
    return {name: value for name, value in config.items() if value is not ...}


LLAMA = "meta-llama/Meta-Llama-3-8B"
DEEPSEEK = "deepseek-ai/DeepSeek-V3"
QWEN_EXPERTS = "Qwen/Qwen3-30B-A3B"
EXPERTS = 257 * 3 * 7168 * 2048 + 256 * 7168 + 256
"""Numbers of DeepSeek-V3's routed and shared experts in one block, of its router and of the router's biases."""
DEEPSEEK_ATTENTION = 1536 * (7168 + 128 * 192) + 7168 * 576 + 512 * 128 * 256 + 7168 * 16384 + 2 * 7168 + 1536 + 512
"""Numbers of its attention and norms in one block."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(tmp_path, name):
    model = read(tmp_path, PUBLISHED[name]["config"])
    assert model.parameters == Architecture.of(model).parameters == PUBLISHED[name]["parameters"]


ALONE = Layout.parse("1", global_batch=1)


def block(model, code, *, experts=False):
    return operations.block(operations.Share(model=model, layout=ALONE, code=code), experts=experts).forward


@pytest.mark.parametrize("kind", SMALL)
def test_a_model_has_and_a_projection_prices_the_operations_that_torch_counts(tmp_path, kind):
    """Products and attention of all blocks and the head, forward; parameters of all blocks and the ends."""
    row = SMALL[kind]
    decoder = dataclasses.replace(read(tmp_path, row["config"]), sequence_length=row["tokens"])
    model, code = Architecture.of(decoder), Implementation(name="", source="", causal_skips=False)
    for each in (decoder, model):
        assert (each.forward_flops, each.parameters) == (row["flops"], row["parameters"])
    flops = products(operations.head(operations.Share(model=model, layout=ALONE, code=code)).forward)
    parameters = operations.end_parameters(model, ALONE, first=True, last=True)
    for experts, layers in ((False, model.layers - model.expert_layers), (True, model.expert_layers)):
        if layers:
            forward = block(model, code, experts=experts)
            flops += layers * (products(forward) + scores(forward))
            parameters += layers * operations.block_share(model, ALONE, experts=experts)
    assert (flops, parameters) == (pytest.approx(row["flops"], rel=1e-12), row["parameters"])


@pytest.mark.parametrize(
    ("source", "like"),
    [
        ("meta-llama/Llama-2-7b-hf", ("llama2-7b", {})),
        (LLAMA, ("llama3-8b", {})),
        ("mistralai/Mistral-7B-v0.3", ("llama3-8b", {"words": 32768})),
        ("mistralai/Mistral-7B-v0.1", None),  # attention in a window
        ("mistralai/Mixtral-8x7B-v0.1", ("mixtral-8x7b", {"sequence_length": 8192})),
        ("openai-community/gpt2", ("gpt2", {"sequence_length": 1024})),
        ("mistralai/Mistral-Nemo-Base-2407", None),  # heads of their own width
        ("Qwen/Qwen2.5-32B", None),
        ("EleutherAI/gpt-neox-20b", None),
        (QWEN_EXPERTS, None),
        (DEEPSEEK, None),
        ("google/gemma-2b", None),
        ("nvidia/Minitron-4B-Base", None),
    ],
)
@pytest.mark.parametrize("mesh", ["dp8", "dp4-tp2", "pp2-dp4", "dp2-cp4"])
def test_a_file_with_modules_of_the_suite_is_projected_as_the_suite_s_own(tmp_path, source, like, mesh):
    config = read(tmp_path, PUBLISHED[source]["config"])
    assert trained_like(config) == like
    layout = Layout.parse(mesh, global_batch=32, sequence_parallel="tp" in mesh)
    said = {name: getattr(layout, name) for name in ("num_micro_batches", "schedule", "sequence_parallel")}
    training = Training(model=str(tmp_path), layout=mesh, dtype="bf16", strategy="hybrid", narrow=True, **said)
    call = case_of(training, layout)
    if like is None:
        assert call == ""
        return
    step, _ = eval(call, {"perf": lambda step, on: (step, on), "workloads": workloads})
    assert step.find_model() == find(*like).built_for(layout.shape.size("tp"))
    device = load_catalog().find("h100")
    own = dataclasses.replace(training, model=like[0], overrides=like[1])
    calibration = Calibration.from_platform(device)
    steps = [project(TrainingJob.of(one, device), calibration) for one in (training, own)]
    assert steps[0].step_time_s == steps[1].step_time_s
    assert steps[0].memory == steps[1].memory


def test_every_family_is_counted_by_torch_and_has_a_published_model():
    assert {*SMALL} == {*FAMILIES}
    types = {row["config"].get("text_config", row["config"])["model_type"] for row in PUBLISHED.values()}
    assert {*FAMILIES, "kimi_k2", "internlm2", "baichuan"} == types


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("llama2-7b", "meta-llama/Llama-2-7b-hf"),
        ("llama2-70b", "meta-llama/Llama-2-70b-hf"),
        ("llama3-8b", LLAMA),
        ("llama3-70b", "meta-llama/Meta-Llama-3-70B"),
        ("llama3-405b", "meta-llama/Llama-3.1-405B"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("gpt2", "openai-community/gpt2"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
        ("qwen2.5-32b", "Qwen/Qwen2.5-32B"),
        ("qwen3-30b-a3b", QWEN_EXPERTS),
        ("deepseek-v3", DEEPSEEK),
    ],
)
def test_named_models_are_those_of_their_files(tmp_path, name, source):
    model, filed = find(name), read(tmp_path, PUBLISHED[source]["config"])
    filed = dataclasses.replace(filed, sequence_length=model.tokens_per_sample)
    assert model.parameters == filed.parameters == PUBLISHED[source]["parameters"]
    assert (model.active_parameters, model.forward_flops) == (filed.active_parameters, filed.forward_flops)
    if isinstance(model, Decoder):
        assert dataclasses.replace(filed, name=name, notes=()) == model


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepseek-v3", "model deepseek-v3 is for perfsuite project and advise only: the suite has no module of it"),
        ("qwen2.5-32b", "is for perfsuite project and advise only"),
        ("some/config.json", "is a file; only perfsuite project and advise read files, so give a model's name"),
    ],
)
def test_the_suite_refuses_models_for_projections_in_one_line(name, message):
    with pytest.raises(InvalidParameter, match=message) as raised:
        workloads.TrainStep(model=name, strategy="ddp")
    assert "\n" not in str(raised.value)
    with pytest.raises(InvalidParameter, match=message):
        TrainParity(model=name, strategy="ddp").plan(MeshShape.parse("dp2"))
    assert not {*PROJECTED} & {*MODELS}


def test_a_journal_makes_no_report_read_a_file(tmp_path):
    read(tmp_path, PUBLISHED[LLAMA]["config"])
    assert stated({"model": str(tmp_path)}) == {}
    assert stated({"model": "llama3-8b"})["hidden_size"] == 4096


def test_a_folder_is_read_by_its_config_unless_a_model_has_its_name(tmp_path, monkeypatch):
    read(tmp_path, PUBLISHED[LLAMA]["config"])
    assert find_projected(str(tmp_path)).parameters == 8030261248
    assert find_projected(str(tmp_path / "config.json"), {"layers": 2}).layers == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert find_projected("gpt2") is find("gpt2") is MODELS["gpt2"]


@pytest.mark.parametrize(
    ("model", "changes", "parameters"),
    [
        ("meta-llama/Llama-2-7b-hf", {"num_key_value_heads": ...}, 6738415616),  # as in files of the first LLaMA
        (LLAMA, {"model_type": ..., "head_dim": None}, 8030261248),
        (LLAMA, {"attention_bias": True, "mlp_bias": True}, 8030261248 + 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)),
        (LLAMA, {"tie_word_embeddings": True}, 8030261248 - 128256 * 4096),
        (QWEN_EXPERTS, {"num_experts": ..., "num_local_experts": 128}, 30532122624),  # as transformers 5 writes it
        (QWEN_EXPERTS, {"mlp_only_layers": [0]}, 30532122624 - 128 * 2048 - 3 * 2048 * (128 * 768 - 6144)),
        (DEEPSEEK, {"n_shared_experts": None}, 671026419200 - 58 * 3 * 7168 * 2048),
        (DEEPSEEK, {"first_k_dense_replace": 61}, 671026419200 - 58 * (EXPERTS - 3 * 7168 * 18432)),
        ("openai-community/gpt2", {"n_inner": 1024}, 124439808 - 12 * (2 * 768 + 1) * 2048),
        (LLAMA, {"model_type": "internlm2", "bias": False}, 8030261248),
    ],
)
def test_fields_that_change_the_count(tmp_path, model, changes, parameters):
    read_model = read(tmp_path, changed(model, **changes))
    assert read_model.parameters == Architecture.of(read_model).parameters == parameters


@pytest.mark.parametrize(
    ("model", "changes", "window"),
    [
        ("mistralai/Mistral-7B-v0.1", {}, (4096, 32)),
        ("mistralai/Mistral-7B-v0.1", {"sliding_window": None}, (0, 0)),
        ("Qwen/Qwen2.5-32B", {}, (0, 0)),  # use_sliding_window is false
        ("Qwen/Qwen2.5-32B", {"use_sliding_window": True, "max_window_layers": 48}, (131072, 16)),
        ("google/gemma-2-9b", {}, (4096, 21)),
        ("google/gemma-2-9b", {"layer_types": [*10 * ["sliding_attention"], *32 * ["full_attention"]]}, (4096, 10)),
        ("google/gemma-3-1b-pt", {}, (512, 22)),
        ("google/gemma-3-1b-pt", {"layer_types": ..., "sliding_window_pattern": 2}, (512, 13)),
        ("microsoft/Phi-3-mini-4k-instruct", {}, (2047, 32)),
    ],
)
def test_sliding_windows_leave_out_pairs_of_tokens(tmp_path, model, changes, window):
    """A token attends to at most W of S tokens: (S - W)^2 / 2 pairs are left out; operations count pairs twice."""
    found = read(tmp_path, changed(model, **changes))
    assert (found.window, found.window_layers) == window
    whole = dataclasses.replace(found, window=0, window_layers=0)
    pairs = (found.sequence_length - min(found.window, found.sequence_length)) ** 2
    left_out = window[1] * 4 * found.heads * found.features * pairs
    assert whole.block_flops - found.block_flops == pytest.approx(left_out, abs=1.0)
    assert Architecture.of(found).forward_flops == pytest.approx(found.forward_flops)
    code = Implementation(name="", source="")
    flops, all_flops = (scores(block(Architecture.of(each), code)) for each in (found, whole))
    assert flops / all_flops == pytest.approx(found.pair_share)


@pytest.mark.parametrize(
    ("model", "changes", "note"),
    [
        (LLAMA, {}, None),
        (LLAMA, {"adapter_width": 16}, "not read, and may change the count: adapter_width"),
        (LLAMA, {"adapter_width": None, "pruned_heads": {}, "is_encoder_decoder": False, "top_p": 1.0}, None),
        (LLAMA, {"pruned_heads": {"0": [1]}}, "not read, and may change the count: pruned_heads"),
        (LLAMA, {f"f{i}": i for i in range(10)}, "may change the count: f0, f1, f2, f3, f4, f5, f6, f7 and 2"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "counted is a LlamaForCausalLM"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "counted as before quantization"),
        (LLAMA, {"model_type": "my_llama"}, "model_type 'my_llama' is read as its architecture, LlamaForCausalLM"),
        (DEEPSEEK, {"quantization_config": ...}, "the layers that predict more than one token are not counted"),
        (LLAMA, {"lm_head_bias": False}, None),
    ],
)
def test_fields_that_are_not_followed_are_named(tmp_path, model, changes, note):
    notes = read(tmp_path, changed(model, **changes)).notes
    assert (not notes) if note is None else (len(notes) == 1 and note in notes[0]), notes


def test_the_language_model_of_a_larger_model_is_read_and_said_so(tmp_path):
    whole = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": PUBLISHED["meta-llama/Llama-2-7b-hf"]["config"],
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024},
    }
    model = read(tmp_path, whole)
    assert model.parameters == 6738415616
    assert model.notes == ("only the language model of text_config is counted, without vision_config",)
    assert read(tmp_path, {**whole, "tie_word_embeddings": True}).parameters == 6738415616 - 32000 * 4096
    short = {**whole, "text_config": {"model_type": "llama", "vocab_size": 32064}}  # as llava-1.5-7b-hf's own file
    with pytest.raises(ConfigurationError, match="text_config has no hidden_size, num_hidden_layers, num_attention_h"):
        read(tmp_path, short)
    with pytest.raises(ConfigurationError, match="the architecture 'clip_text_model' is not read"):
        read(tmp_path, {**whole, "text_config": {"model_type": "clip_text_model", "hidden_size": 512}})


REFUSED = [
    ("", ":1: not JSON (Expecting value"),
    ("[1, 2]", "holds a list, not an object"),
    (b"\xff\xfe", "is not UTF-8 at byte 0"),
    ("[" * 100000, "nested too deep"),
    ('{"hidden_size": 1' + 9000 * "0" + "}", "digits is not a number"),
    ({}, "has neither model_type nor architectures"),
    ({"dim": 4096, "n_layers": 32}, "it is not a model's config.json"),  # params.json of Meta's own release
    ({"model_type": 12}, "model_type=12 is not valid; give a name such as llama"),
    ({"model_type": "qwen4"}, "'qwen4' is not read; did you mean qwen3"),
    ({"model_type": "bert"}, "'bert' is not read; Use one of llama, mistral"),
    ({"architectures": "LlamaForCausalLM"}, 'architectures="LlamaForCausalLM" is not valid; give a list'),
    (changed(LLAMA, hidden_size=...), "has no hidden_size, which LlamaForCausalLM needs"),
    (changed(LLAMA, hidden_size=None, vocab_size=...), "has no hidden_size, vocab_size"),
    (changed(LLAMA, hidden_size="4096"), 'hidden_size="4096" is not valid; give a whole number from 1 to 16777216'),
    (changed(LLAMA, hidden_size=4096.0), "hidden_size=4096.0 is not valid"),
    (changed(LLAMA, hidden_size=True), "hidden_size=true is not valid"),
    (changed(LLAMA, hidden_size=[4096]), "hidden_size=a list is not valid"),
    (changed(LLAMA, num_hidden_layers=0), "num_hidden_layers=0 is not valid"),
    (changed(LLAMA, num_hidden_layers=10**9), "num_hidden_layers=1000000000 is not valid"),
    (changed(LLAMA, num_hidden_layers=10**6), "layers=1000000 of model"),
    (changed(LLAMA, num_attention_heads=33), "does not divide"),
    (changed(LLAMA, max_position_embeddings=0), "max_position_embeddings=0 is not valid"),
    (changed(LLAMA, mlp_bias="no"), 'mlp_bias="no" is not valid; give true or false'),
    (changed(LLAMA, tie_word_embeddings=1), "tie_word_embeddings=1 is not valid"),
    (changed(LLAMA, layer_types=["linear_attention"] * 32), "layer_types has unknown layers"),
    (changed(LLAMA, model_type="internlm2", bias=True), "bias=true changes the count in a way that is not read"),
    (changed("bigcode/starcoder2-15b", norm_type="rms_norm"), 'norm_type="rms_norm" changes the count'),
    (changed(DEEPSEEK, moe_layer_freq=2), "moe_layer_freq=2 changes the count in a way that is not read; only 1 is"),
    (changed(DEEPSEEK, attention_bias=True), "attention_bias=true changes the count"),
    (changed(DEEPSEEK, num_experts_per_tok=300), "top_k=300"),
    (changed(DEEPSEEK, qk_nope_head_dim=...), "qk_nope_head_dim=null is not valid"),
    (changed(DEEPSEEK, first_k_dense_replace=-3), "first_k_dense_replace=-3 is not valid; give a whole number from 0"),
    (changed(QWEN_EXPERTS, decoder_sparse_step=2), "decoder_sparse_step=2 changes the count"),
    (changed(QWEN_EXPERTS, shared_expert_intermediate_size=512), "shared_expert_intermediate_size=512 changes"),
    (changed(QWEN_EXPERTS, mlp_only_layers=[3]), "mlp_only_layers=a list is not read"),
    (changed(DEEPSEEK, topk_method="greedy"), 'topk_method="greedy" changes the count'),
    (changed(LLAMA, is_encoder_decoder=True), "is_encoder_decoder=true changes the count"),
    (changed("openai-community/gpt2", add_cross_attention=True), "add_cross_attention=true changes the count"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_file_without_a_model_is_refused_in_one_line(tmp_path, capsys, monkeypatch, config, message):
    monkeypatch.setenv(TRACEBACK, "1")  # what nobody foresaw raises
    with pytest.raises(ConfigurationError):
        read(tmp_path, config)
    for command in ("project", "advise"):
        assert message in refused(capsys, command, "--model", tmp_path / "config.json", *SIZES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("meta-llama/Llama-2-7b-hf", "cannot be read: No such file or directory; give the config.json of a model"),
        ("/dev/zero", "it is a pipe or a device"),
        ("llama3-8", "did you mean llama3-8b"),
        ("x" * 5000 + ".json", "cannot be read"),
        ("a/\0b", "null"),
        ("\0", "is unknown"),
    ],
)
def test_names_that_no_model_has(capsys, monkeypatch, name, message):
    monkeypatch.setenv(TRACEBACK, "1")
    assert message in refused(capsys, "project", "--model", name, *SIZES)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layers=2", "dense_layers=3 of model deepseek-v3 leaves no layer with experts"),
        ("notes=3", "has no field notes"),
        ("tied=2", "tied=2 of model deepseek-v3 is not valid; choose a whole number from 0 to 1"),
        ("words=-5", "words=-5"),
    ],
)
def test_overrides_that_make_no_model(capsys, monkeypatch, override, message):
    monkeypatch.setenv(TRACEBACK, "1")
    assert message in refused(capsys, "project", "--model", "deepseek-v3", *SIZES, "--override", override)


def test_project_and_advise_print_the_model_of_a_file(tmp_path, capsys):
    read(tmp_path, PUBLISHED[DEEPSEEK]["config"])
    name = str(tmp_path / "config.json")
    command = ["--model", name, "--platform", "h100", "--world", "1024", "--global-batch", "4096"]
    layout = ["--layout", "dp32-ep32", "--sharding", "parameters", "--checkpointing", "full"]
    lines = printed(capsys, "project", *command, *layout).splitlines()
    assert lines[1].removeprefix("model            ") == (
        f"{name}: 671,026,419,200 parameters (37,552,297,472 active per token), 61 layers x 7,168, 128 heads, "
        "256 experts, 129,280 words, 4,096 tokens per sample"
    )
    assert lines[2].startswith("model            num_nextn_predict_layers: ")
    plain = as_json(capsys, "project", *command, *layout)
    assert (plain["parameters"], plain["active_parameters"]) == (671026419200, 37552297472)
    assert len(plain["model_notes"]) == 2
    smaller = ["--world", "16", "--global-batch", "64", "--override", "layers=4", "--sequence-length", "8192"]
    lines = printed(capsys, "advise", *command, *smaller).splitlines()
    parameters = 671026419200 - 57 * (EXPERTS + DEEPSEEK_ATTENTION)
    assert lines[1].startswith(f"  {name}: {parameters:,} parameters")
    assert lines[1].endswith("8,192 tokens per sample")
    assert f"the suite trains no case of these layouts of {name}" in lines


@pytest.mark.parametrize(
    ("model", "changes", "tokens"),
    [
        ("meta-llama/Llama-2-7b-hf", {}, 4096),
        (LLAMA, {}, 8192),
        ("openai-community/gpt2", {}, 1024),
        (DEEPSEEK, {}, 4096),
        (DEEPSEEK, {"rope_scaling": ..., "rope_parameters": {"original_max_position_embeddings": 4096}}, 4096),
        (DEEPSEEK, {"rope_scaling": {"original_max_position_embeddings": "4096"}}, 8192),
        (LLAMA, {"max_position_embeddings": ...}, 8192),
    ],
)
def test_samples_have_the_positions_before_a_rotary_scaling_and_8192_tokens_at_most(tmp_path, model, changes, tokens):
    assert read(tmp_path, changed(model, **changes)).sequence_length == tokens


def test_learned_positions_grow_with_the_tokens_of_a_sample(tmp_path, capsys):
    read(tmp_path, PUBLISHED["openai-community/gpt2"]["config"])
    command = ["project", "--model", tmp_path, "--platform", "h100", "--global-batch", "8"]
    out = printed(capsys, *command, "--sequence-length", "2048")
    assert f"{124439808 + 1024 * 768:,} parameters" in out
    said = refused(capsys, *command, "--override", "sequence_length=2048")
    assert "exceeds its 1024 learned positions" in said


VALUES = st.none() | st.booleans() | st.integers(-3, 70) | st.integers() | st.floats() | st.text(max_size=5)
VALUES |= st.lists(st.integers(-1, 3), max_size=3) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(SMALL)), nested=st.booleans())
def test_a_damaged_config_is_read_or_refused_in_one_line(tmp_path_factory, data, kind, nested):
    config = copy.deepcopy(SMALL[kind]["config"])
    names = st.sampled_from([*config, "text_config", "layer_types", "mlp_only_layers"])
    for name in data.draw(st.lists(names, max_size=4)):
        if data.draw(st.booleans()):
            config.pop(name, None)
        else:
            config[name] = data.draw(VALUES)
    folder = tmp_path_factory.mktemp("damaged")
    why = ""
    try:
        model = read(folder, {"model_type": "larger", "text_config": config} if nested else config)
    except ConfigurationError as error:
        why = str(error)
    if why:
        assert why.startswith(str(folder))
        assert "\n" not in why
        return
    counted = Architecture.of(model)
    assert counted.parameters == model.parameters > 0
    assert counted.forward_flops == model.forward_flops > 0
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRACEBACK, "1")
        code = main(["project", "--model", str(folder), "--layout", data.draw(st.sampled_from(LAYOUTS)), *SIZES])
    lines = said.getvalue().splitlines()
    assert (code == 4 and len(lines) == 1) or (code == 0 and f"{model.parameters:,} parameters" in lines[1]), lines
