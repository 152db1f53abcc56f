"""Frozen encoders against those that the programs use: diffusers' AutoencoderKL and transformers' T5EncoderModel.

    pip install diffusers transformers && python benchmarks/encoders_truth.py

Parameters of the published sizes, and outputs with the same weights on smaller inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers import AutoencoderKL  # type: ignore[import-not-found,unused-ignore] # not among the requirements
from transformers import T5Config, T5EncoderModel  # type: ignore[import-not-found,unused-ignore] # as above

from perfsuite.models.dit_module import FrozenEncoders
from perfsuite.models.program import ENCODERS, Encoders

_PICTURE = {
    "norm": "group_norm", "query": "to_q", "key": "to_k", "value": "to_v", "project": "to_out.0",
    "skip": "conv_shortcut",
}  # fmt: skip
"""Names of our modules -> diffusers'; others are equal."""
_TEXT = {
    "norm": "0.layer_norm", "query": "0.SelfAttention.q", "key": "0.SelfAttention.k", "value": "0.SelfAttention.v",
    "project": "0.SelfAttention.o", "mlp_norm": "1.layer_norm", "gate": "1.DenseReluDense.wi_0",
    "up": "1.DenseReluDense.wi_1", "down": "1.DenseReluDense.wo",
}  # fmt: skip
"""Names of our modules of a layer -> transformers'."""


def main() -> None:
    """Print both sides of each comparison."""
    torch.manual_seed(0)
    published = ENCODERS["t5xxl-sdvae"]
    assert published.text is not None, "Open-Sora's encoders read text"
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=published.picture.channels, layers_per_block=2, latent_channels=4,
    ).eval()  # fmt: skip
    parts = (*vae.encoder.parameters(), *vae.quant_conv.parameters())
    print("parameters of the VAE's encoder:", sum(map(torch.numel, parts)), published.picture.parameters)
    with torch.device("meta"):
        whole = T5EncoderModel(_t5(published))
    print("parameters of T5-XXL's encoder:", sum(map(torch.numel, whole.parameters())), published.text.parameters)

    tiny = ENCODERS["tiny-text-picture"]
    assert tiny.text is not None, "it has text too"
    ours = FrozenEncoders(Encoders(text=tiny.text, picture=published.picture))
    t5 = T5EncoderModel(_t5(tiny)).eval()
    ours.picture.load_state_dict(_picture_weights(ours.picture.state_dict(), vae.state_dict()))
    assert ours.text is not None, "it has text too"
    ours.text.load_state_dict(_text_weights(ours.text.state_dict(), t5.state_dict()))
    pixels, words = torch.randn(2, 3, 1, 64, 64), torch.randint(0, tiny.text.words, (2, 150))
    with torch.no_grad():
        encoded = ours({"video": pixels, "words": words})
        latents = vae.encode(pixels[:, :, 0]).latent_dist.mean * 0.18215
        features = t5(words).last_hidden_state
    for name, one, other in (
        ("latents", encoded["latents"][:, :, 0], latents),
        ("caption", encoded["caption"], features),
    ):
        print(f"{name}: largest difference {float((one - other).abs().max()):.1e} of {float(other.abs().max()):.3g}")


def _t5(encoders: Encoders) -> Any:
    text = encoders.text
    assert text is not None, "only encoders with text are compared"
    return T5Config(
        d_model=text.width, d_ff=text.hidden, num_heads=text.heads, d_kv=64, num_layers=text.layers,
        vocab_size=text.words, feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False,
        dropout_rate=0.0,
    )  # fmt: skip


def _stages() -> Iterator[str]:
    """Diffusers' names of our stages, in their order; empty for the activation."""
    yield "encoder.conv_in"
    for level in range(4):
        yield from (f"encoder.down_blocks.{level}.resnets.{block}" for block in range(2))
        if level < 3:
            yield f"encoder.down_blocks.{level}.downsamplers.0"
    yield from ("encoder.mid_block.resnets.0", "encoder.mid_block.attentions.0", "encoder.mid_block.resnets.1")
    yield from ("encoder.conv_norm_out", "", "encoder.conv_out", "quant_conv")


def _picture_weights(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names, found = list(_stages()), {}
    for key, value in ours.items():
        _, number, *inside = key.split(".")
        path = [names[int(number)], *(_PICTURE.get(name, name) for name in inside)]
        found[key] = theirs[".".join(path)].reshape(value.shape)
    return found


def _text_weights(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {
        "words.weight": theirs["shared.weight"],
        "distances.weight": theirs["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
        "norm.weight": theirs["encoder.final_layer_norm.weight"],
    }
    for key in ours.keys() - found.keys():
        _, number, name, leaf = key.split(".")
        found[key] = theirs[f"encoder.block.{number}.layer.{_TEXT[name]}.{leaf}"]
    return found


if __name__ == "__main__":
    main()
