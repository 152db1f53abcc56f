"""Read the ``config.json`` of a Hugging Face model as a :class:`Decoder`, for projections, without transformers.

A file is refused if its parameters cannot be counted exactly; unknown fields are listed in the model's notes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError, InvalidParameter, did_you_mean, nearest
from perfsuite.models.decoder import Decoder
from perfsuite.record.codec import read_json

_MOST_BYTES = 1 << 20
_LARGEST = 1 << 24
_TOKENS = 8192
"""Most tokens of a sample: a file has the positions of the finished model, and pretraining uses shorter samples."""
_SIZES = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "vocab_size": "words",
    "intermediate_size": "hidden",
}
_GROUPED = {**_SIZES, "num_key_value_heads": "kv_heads"}
_OWN_HEADS = {**_GROUPED, "head_dim": "head_width"}
_LATENT = {
    **_SIZES,
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_hidden",
    "kv_lora_rank": "key_rank",
    "qk_rope_head_dim": "rope_width",
    "v_head_dim": "value_width",
}
_EXPECTED = {"is_encoder_decoder": False, "add_cross_attention": False}
_BIASES = ("input_biases", "output_bias")


@dataclass(frozen=True, kw_only=True)
class FileFields:
    """The fields of one architecture's configurations."""

    architecture: str  # Name in the field ``architectures``
    sizes: Mapping[str, str]  # Required sizes: field of the file -> field of the decoder
    optional: Mapping[str, str] = field(default_factory=dict)
    """Optional sizes: field of the file -> field of the decoder."""
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Field of the file -> fields of the decoder that it sets to true."""
    defaults: tuple[str, ...] = ()  # Fields of the file that are true if they are absent
    always: Mapping[str, Any] = field(default_factory=dict)
    """Values of decoder fields in every model of the architecture."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """Field of the file -> the supported value; any other changes the count."""
    other_fields: tuple[str, ...] = ()  # Fields of the file that :func:`_complete` reads, or that add nothing
    assumed: Mapping[str, int] = field(default_factory=dict)  # Sizes that transformers leaves out of a nested file


_HEADS = {"head_dim": "head_width"}
_LLAMA = FileFields(
    architecture="LlamaForCausalLM",
    sizes=_SIZES,
    optional={**_HEADS, "num_key_value_heads": "kv_heads"},
    flags={"attention_bias": _BIASES, "mlp_bias": ("mlp_biases",)},
    expected={"bias": False},  # of internlm2
)
_ALL_BIASES = {"use_bias": (*_BIASES, "mlp_biases")}
_EVERY_LAYER = {"attention_bias": False, "moe_layer_freq": 1}
_DEEPSEEK = FileFields(
    architecture="DeepseekV3ForCausalLM",
    sizes=_LATENT,
    optional={"q_lora_rank": "query_rank"},
    always={"router_biases": True},
    expected={**_EVERY_LAYER, "topk_method": "noaux_tc"},
    other_fields=(
        *("topk_method", "first_k_dense_replace", "n_shared_experts", "qk_nope_head_dim"),
        *("num_key_value_heads", "head_dim", "qk_head_dim"),
    ),
)
_GEMMA = FileFields(
    architecture="GemmaForCausalLM",
    sizes=_OWN_HEADS,
    flags={"attention_bias": _BIASES},
    defaults=("tie_word_embeddings",),
)


FAMILIES: Mapping[str, FileFields] = {
    "llama": _LLAMA,
    "mistral": FileFields(architecture="MistralForCausalLM", sizes=_GROUPED, optional=_HEADS),
    "mixtral": FileFields(
        architecture="MixtralForCausalLM",
        sizes={**_GROUPED, "num_local_experts": "experts", "num_experts_per_tok": "top_k"},
        optional=_HEADS,
    ),
    "qwen2": FileFields(
        architecture="Qwen2ForCausalLM", sizes=_GROUPED, optional=_HEADS, always={"input_biases": True}
    ),
    "qwen3": FileFields(
        architecture="Qwen3ForCausalLM",
        sizes=_OWN_HEADS,
        flags={"attention_bias": _BIASES},
        always={"head_norms": True},
    ),
    "qwen3_moe": FileFields(
        architecture="Qwen3MoeForCausalLM",
        sizes={
            **_GROUPED,
            "num_experts": "experts",
            "num_experts_per_tok": "top_k",
            "moe_intermediate_size": "expert_hidden",
        },
        optional=_HEADS,
        flags={"attention_bias": _BIASES},
        always={"head_norms": True},
        expected={
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 0,
            "qkv_bias": False,
            "use_qk_norm": True,
        },
        other_fields=("mlp_only_layers",),
    ),
    "gpt_neox": FileFields(
        architecture="GPTNeoXForCausalLM",
        sizes=_SIZES,
        flags={"attention_bias": _BIASES},
        defaults=("attention_bias",),
        always={"gated": False, "layer_norms": True, "mlp_biases": True},
    ),
    "gpt2": FileFields(
        architecture="GPT2LMHeadModel",
        sizes={
            "n_embd": "width",
            "n_layer": "layers",
            "n_head": "heads",
            "vocab_size": "words",
            "n_positions": "context",
        },
        optional={"n_inner": "hidden"},
        defaults=("tie_word_embeddings",),
        always={"gated": False, "layer_norms": True, "input_biases": True, "output_bias": True, "mlp_biases": True},
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": replace(_DEEPSEEK, architecture="DeepseekV2ForCausalLM", always={}, expected=_EVERY_LAYER),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, architecture="Gemma2ForCausalLM", always={"block_norms": 4}),
    "gemma3_text": replace(
        _GEMMA,
        architecture="Gemma3ForCausalLM",
        always={"block_norms": 4, "head_norms": True},
        assumed={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    ),
    "phi3": replace(_LLAMA, architecture="Phi3ForCausalLM", flags={}, expected={"attention_bias": False}),
    "granite": replace(_LLAMA, architecture="GraniteForCausalLM"),
    "glm": replace(_LLAMA, architecture="GlmForCausalLM", flags={"attention_bias": ("input_biases",)}),
    "ernie4_5": replace(
        _LLAMA, architecture="Ernie4_5ForCausalLM", flags=_ALL_BIASES, defaults=("tie_word_embeddings",)
    ),
    "starcoder2": FileFields(
        architecture="Starcoder2ForCausalLM",
        sizes=_GROUPED,
        flags=_ALL_BIASES,
        defaults=("use_bias", "tie_word_embeddings"),
        always={"gated": False, "layer_norms": True},
        expected={"mlp_type": "default", "norm_type": "layer_norm"},
    ),
    "nemotron": replace(_LLAMA, architecture="NemotronForCausalLM", always={"gated": False, "layer_norms": True}),
}
"""Architectures by ``model_type``."""
_SAME: Mapping[str, str] = {
    "kimi_k2": "deepseek_v3",
    **dict.fromkeys(("internlm2", "baichuan"), "llama"),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Model types whose language models have the fields and modules of another type."""
_NESTED = ("text_config", "language_config", "llm_config")
_WITHOUT_COUNT = re.compile(
    r"architectures|model_type|_?name_or_path|auto_map|tokenizer_class|transformers_version|(torch_)?dtype|use_cache|"
    r"\w+_token_id|max_position_embeddings|tie_word_embeddings|quantization_config|unsloth_\w+|"
    r"initializer_\w+|\w+_eps|layer_norm_epsilon|hidden_act(ivation)?|activation_function|\w*drop(out)?(_prob)?|"
    r"rope_\w+|rotary(_\w+)?|partial_rotary_factor|use_mrope|original_max_position_embeddings|n_ctx|"
    r"(use_|_)?sliding_window(_\w+)?|max_window_layers|layer_types|use_bidirectional_attention|scale_attn_\w+|"
    r"_?attn_implementation\w*|reorder_and_upcast_attn|\w+_softcapping|query_pre_attn_scalar|cache_implementation|"
    r"pretraining_tp|num_nextn_predict_layers|use_parallel_residual|aux_loss_alpha|seq_aux|norm_topk_prob|topk_group|"
    r"n_group|scoring_func|routed_scaling_factor|ep_size|router_aux_loss_coef|router_jitter_noise|summary_\w+|"
    r"output_(attentions|hidden_states|router_logits|past|scores)|return_dict\w*|task_specific_params|is_llama_config|"
    r"chunk_size_feed_forward|id2label|label2id|num_labels|problem_type|is_decoder|finetuning_task|prefix|torchscript|"
    r"\w+_multiplier|logits_scaling|z_loss_weight|model_max_length|"
    # Settings of text generation, in older files.
    r"m(in|ax)_length|temperature|typical_p|top_[kp]|do_sample|num_beam\w*|\w+_penalty|\w+_ngram_size|early_stopping|"
    r"num_return_sequences|remove_invalid_values|\w*suppress_tokens|bad_words_ids|use_bfloat16|tf_legacy_loss|"
    r"tie_encoder_decoder|gradient_checkpointing"
)
"""Fields that change neither parameters nor operations, or that the notes mention."""


def read_config(path: Path) -> Decoder:
    """Return the model of a ``config.json`` or its folder; raises ConfigurationError if it cannot be counted."""
    file = path / "config.json" if os.path.isdir(path) else path
    where, config, notes = _text_part(str(file), _object(file))
    kind, family = _family(where, config, notes)
    if "num_experts" in family.sizes and config.get("num_experts") is None:  # transformers 5 has another name for it
        config = {**config, "num_experts": config.get("num_local_experts"), "num_local_experts": None}
    assumed = {name: size for name, size in family.assumed.items() if name not in config and where != str(file)}
    if assumed:
        config = {**config, **assumed}
        sizes = ", ".join(f"{name}={size}" for name, size in assumed.items())
        notes.append(f"not in the file, so as in transformers: {sizes}")
    values = {**family.always, **_sizes(where, family, config), **_flags(where, family, config)}
    _complete(where, kind, config, values)
    values["sequence_length"] = min(_TOKENS, values.get("context") or _positions(where, config))
    notes += _remarks(family, config)
    try:
        return Decoder(name=str(path), notes=tuple(notes), **values)
    except InvalidParameter as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _positions(where: str, config: Mapping[str, Any]) -> int:
    """Return the tokens of the model before rotary positions were scaled."""
    name = "max_position_embeddings"
    positions = _TOKENS if config.get(name) is None else _size(where, config, name, 1)
    for scaling in (config.get("rope_scaling"), config.get("rope_parameters")):
        before = scaling.get(f"original_{name}") if isinstance(scaling, dict) else None
        if type(before) is int and 1 <= before < positions:
            return before
    return positions


def _object(file: Path) -> dict[str, Any]:
    asked = "give the config.json of a model, its folder, or a model's name"
    plain = read_json(file, ConfigurationError, asked, kind="model ", most_bytes=_MOST_BYTES)
    if not isinstance(plain, dict):
        raise ConfigurationError(f"model {file} holds {_shown(plain)}, not an object; {asked}")
    return plain


def _text_part(file: str, plain: dict[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """Return (where, fields, notes) of the language model in a file."""
    for name in _NESTED:
        config = plain.get(name)
        if isinstance(config, dict) and ("hidden_size" in config or not plain.keys() & {"hidden_size", "n_embd"}):
            config = dict(config)
            if plain.get("tie_word_embeddings") is not None:  # the output projection is outside the nested model
                config["tie_word_embeddings"] = plain["tie_word_embeddings"]
            others = sorted(key for key, value in plain.items() if isinstance(value, dict) and key.endswith("_config"))
            left = ", ".join(key for key in others if key not in (name, "quantization_config")) or "the other modules"
            return f"{file}, {name}", config, [f"only the language model of {name} is counted, without {left}"]
    return file, plain, []


def _family(where: str, config: Mapping[str, Any], notes: list[str]) -> tuple[str, FileFields]:
    kind, names = config.get("model_type"), config.get("architectures") or []
    if kind is not None and not isinstance(kind, str):
        raise ConfigurationError(f"{where}: model_type={_shown(kind)} is not valid; give a name such as llama")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"{where}: architectures={_shown(names)} is not valid; give a list of one name")
    if not kind and not names:
        text = "it is not a model's config.json; give that file"
        raise ConfigurationError(f"{where} has neither model_type nor architectures, so {text}")
    kind = _SAME.get(kind or "", kind or "")
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    if kind not in FAMILIES and names and names[0] in by_architecture:
        notes.append(f"model_type {kind!r} is read as its architecture, {names[0]}")
        kind = by_architecture[names[0]]
    if kind not in FAMILIES:
        asked = kind or names[0]
        meant = f"{did_you_mean(asked, FAMILIES)} " if nearest(asked, FAMILIES, likeness=0.7) else ""
        raise ConfigurationError(
            f"{where}: the architecture {asked[:60]!r} is not read; {meant}Use one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    if names and names[0] != family.architecture:
        notes.append(f"architectures has {names[0][:60]!r}; counted is a {family.architecture}")
    return kind, family


def _sizes(where: str, family: FileFields, config: Mapping[str, Any]) -> dict[str, int]:
    missing = [name for name in family.sizes if config.get(name) is None]
    if missing:
        raise ConfigurationError(
            f"{where} has no {', '.join(missing)}, which {family.architecture} needs; write {missing[0]} into the file"
        )
    optional = {name: field for name, field in family.optional.items() if config.get(name) is not None}
    return {field: _size(where, config, name, 1) for name, field in {**family.sizes, **optional}.items()}


def _flags(where: str, family: FileFields, config: Mapping[str, Any]) -> dict[str, bool]:
    flags = {}
    for name, fields in {**family.flags, "tie_word_embeddings": ("tied",)}.items():
        value = config.get(name)
        if value is None:
            value = name in family.defaults
        if not isinstance(value, bool):
            raise ConfigurationError(f"{where}: {name}={_shown(value)} is not valid; give true or false")
        flags.update(dict.fromkeys(fields, value))
    for name, expected in {**_EXPECTED, **family.expected}.items():
        value = config.get(name)
        if value is not None and (type(value), value) != (type(expected), expected):
            raise ConfigurationError(
                f"{where}: {name}={_shown(value)} changes the count in a way that is not read; "
                f"only {_shown(expected)} is"
            )
    return flags


def _complete(where: str, kind: str, config: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Add the sizes that follow from others; raises ConfigurationError for unsupported lists of layers."""
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("hidden", 4 * values["width"])
    if kind == "mixtral":
        values["expert_hidden"] = values["hidden"]
    if kind in ("deepseek_v2", "deepseek_v3"):
        values["head_width"] = values["rope_width"] + _size(where, config, "qk_nope_head_dim", 1)
        values["dense_layers"] = _size(where, config, "first_k_dense_replace", 0)
        shared = 0 if config.get("n_shared_experts") is None else _size(where, config, "n_shared_experts", 0)
        values["shared_hidden"] = shared * values["expert_hidden"]
    dense = config.get("mlp_only_layers") or []
    if kind == "qwen3_moe" and dense:
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            raise ConfigurationError(
                f"{where}: mlp_only_layers={_shown(dense)} is not read; dense layers have to be the first: 0, 1, ..."
            )
        values["dense_layers"] = len(dense)
    if values.get("experts") and values.get("dense_layers", 0) >= values["layers"]:
        values.update(dict.fromkeys(("experts", "top_k", "expert_hidden", "shared_hidden", "dense_layers"), 0))
        values["router_biases"] = False
    elif values.get("experts") and not values.get("dense_layers"):
        values["hidden"] = values["expert_hidden"]  # no layer has an MLP without experts
    values.update(_windows(where, kind, config, values["layers"]))


def _windows(where: str, kind: str, config: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Return the sliding window, and the number of layers that have it."""
    kinds = config.get("layer_types")
    attention = ("full_attention", "sliding_attention")
    if kinds is not None and (not isinstance(kinds, list) or any(one not in attention for one in kinds)):
        raise ConfigurationError(f"{where}: layer_types has unknown layers; only {' and '.join(attention)} are read")
    qwen = kind.startswith("qwen")
    if not config.get("sliding_window") or not config.get("use_sliding_window", not qwen):
        return {}
    every = {"gemma2": 2, "gemma3_text": 6}.get(kind, 0)  # each of these layers attends to all tokens
    if config.get("sliding_window_pattern") is not None:
        every = _size(where, config, "sliding_window_pattern", 1)
    first = _size(where, config, "max_window_layers", 0) if qwen and config.get("max_window_layers") is not None else 0
    count = kinds.count("sliding_attention") if kinds else max(0, layers - first) - (layers // every if every else 0)
    return {"window": _size(where, config, "sliding_window", 1), "window_layers": count} if count else {}


def _remarks(family: FileFields, config: Mapping[str, Any]) -> list[str]:
    """Return notes on fields that the projection ignores."""
    notes = []
    if config.get("num_nextn_predict_layers"):
        notes.append("num_nextn_predict_layers: the layers that predict more than one token are not counted")
    if config.get("quantization_config"):
        notes.append("quantization_config: parameters are counted as before quantization")
    read = {*family.sizes, *family.optional, *family.flags, *family.expected, *_EXPECTED, *family.other_fields}
    without = {name for name, value in config.items() if value is False and name.endswith("_bias")}
    named = {name for name, value in config.items() if value not in (None, [], {})} - read - without
    others = sorted(name for name in named if not _WITHOUT_COUNT.fullmatch(name))
    if others:
        shown = ", ".join(name[:40] for name in others[:8]) + (f" and {len(others) - 8} more" if others[8:] else "")
        notes.append(f"not read, and may change the count: {shown}")
    return notes


def _size(where: str, config: Mapping[str, Any], name: str, least: int) -> int:
    value = config.get(name)
    if type(value) is not int or not least <= value <= _LARGEST:
        raise ConfigurationError(
            f"{where}: {name}={_shown(value)} is not valid; give a whole number from {least} to {_LARGEST}"
        )
    return value


def _shown(value: object) -> str:
    """Return a value as short JSON."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
