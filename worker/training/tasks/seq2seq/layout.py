"""Which tensors the T5 of a config.json has. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.errors import Rejected
from worker.training.tasks.layout import Layout

HEAD, EMBEDDING = "lm_head.weight", "shared.weight"
ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Other names of the embedding, under which some versions wrote it (beside, or in place of, `shared.weight`)."""
UNUSED = frozenset({"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"})
"""In the files of the first T5s; no version of the model has had a use for it."""
_LAYERS = ("num_layers", "num_decoder_layers")
_MOST_LAYERS = 1000


def declares_untied_head(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that the head is a tensor of its own.

    transformers 5 saves `tie_word_embeddings` as true for every T5 and leaves the truth in `scale_decoder_outputs`.
    """
    return config.get("tie_word_embeddings") is False or config.get("scale_decoder_outputs") is False


def t5_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape; what is shared, once. Defaults are those of T5Config. Raises Rejected (`bad_config`)."""
    try:
        return _t5_shapes(config)
    except (TypeError, ValueError) as error:
        raise Rejected(
            f"model: config.json cannot be understood: {error}", code="bad_config", param="model",
            hint="take the original file",
        ) from None  # fmt: skip


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The tensors of this T5. Raises Rejected (`bad_config`)."""
    return Layout(t5_shapes(config), head=HEAD, embedding=EMBEDDING, aliases=ALIASES, unused=UNUSED)


def _t5_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    def size(key: str, default: int) -> int:
        value = config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} is {value!r}")
        if key in _LAYERS and value > _MOST_LAYERS:
            raise ValueError(f"{key} is {value}, and no model has more than {_MOST_LAYERS} layers")
        return value

    width, hidden, heads = size("d_model", 512), size("d_ff", 2048), size("num_heads", 8)
    inner, vocabulary = heads * size("d_kv", 64), size("vocab_size", 32128)
    for key in ("decoder_start_token_id", "pad_token_id"):
        token = config.get(key)
        if token is not None and not (type(token) is int and 0 <= token < vocabulary):
            raise ValueError(f"{key} is {token!r}")
    for key in ("dropout_rate", "layer_norm_epsilon"):
        share = config.get(key, 0)
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"{key} is {share!r}")
    buckets, layers = size("relative_attention_num_buckets", 32), size("num_layers", 6)
    decoders = layers if config.get("num_decoder_layers") is None else size("num_decoder_layers", layers)
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, width)}
    for stack, count in (("encoder", layers), ("decoder", decoders)):
        attentions = ["SelfAttention"] if stack == "encoder" else ["SelfAttention", "EncDecAttention"]
        for block in range(count):
            prefix = f"{stack}.block.{block}.layer"
            for number, attention in enumerate(attentions):
                shapes |= {f"{prefix}.{number}.{attention}.{one}.weight": (inner, width) for one in "qkv"}
                shapes[f"{prefix}.{number}.{attention}.o.weight"] = (width, inner)
                shapes[f"{prefix}.{number}.layer_norm.weight"] = (width,)
            last = f"{prefix}.{len(attentions)}"
            shapes |= {
                f"{last}.DenseReluDense.{one}.weight": (hidden, width)
                for one in (("wi_0", "wi_1") if gated else ("wi",))
            }
            shapes[f"{last}.DenseReluDense.wo.weight"] = (width, hidden)
            shapes[f"{last}.layer_norm.weight"] = (width,)
        shapes[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (buckets, heads)
        shapes[f"{stack}.final_layer_norm.weight"] = (width,)
    if declares_untied_head(config):
        shapes[HEAD] = (vocabulary, width)
    return shapes
