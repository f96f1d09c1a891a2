"""Which tensors the model of a config.json has. Those of T5 and mT5 are known here."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from jobs.errors import Rejected
from worker.training.tasks.flops import TokenFlops
from worker.training.tasks.layout import Layout, built_layout

T5_FAMILIES = ("t5", "mt5")
"""`model_type` of models whose tensors and layers are T5's."""

HEAD, EMBEDDING = "lm_head.weight", "shared.weight"
ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Other names of the embedding, under which some versions wrote it (beside, or in place of, `shared.weight`)."""
UNUSED = frozenset({"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"})
"""In the files of the first T5s; no version of the model has had a use for it."""
_LAYERS = ("num_layers", "num_decoder_layers")
_MOST_LAYERS = 1000
_T5_DEFAULTS = {
    "d_model": 512, "d_ff": 2048, "num_heads": 8, "d_kv": 64, "vocab_size": 32128, "num_layers": 6,
    "relative_attention_num_buckets": 32, "feed_forward_proj": "relu",
}  # fmt: skip
_MT5_DEFAULTS = _T5_DEFAULTS | {
    "d_ff": 1024,
    "num_heads": 6,
    "vocab_size": 250112,
    "num_layers": 8,
    "feed_forward_proj": "gated-gelu",
}


def declares_untied_head(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that the head is a tensor of its own.

    transformers 5 saves `tie_word_embeddings` as true for every T5 and leaves the truth in `scale_decoder_outputs`; of
    an mT5 it leaves nothing, but all mT5 have a head of their own.
    """
    return (
        config.get("model_type") == "mt5"
        or config.get("tie_word_embeddings") is False
        or config.get("scale_decoder_outputs") is False
    )


def t5_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape; what is shared, once. Defaults are those of T5Config or MT5Config.

    Raises Rejected (`bad_config`).
    """
    try:
        return _t5_shapes(config)
    except (TypeError, ValueError) as error:
        raise Rejected(
            f"model: config.json cannot be understood: {error}", code="bad_config", param="model",
            hint="take the original file",
        ) from None  # fmt: skip


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The tensors of this model. Raises Rejected (`bad_config`)."""
    if not is_t5(config):
        return _built(json.dumps(config, sort_keys=True))
    return Layout(t5_shapes(config), head=HEAD, embedding=EMBEDDING, aliases=ALIASES, unused=UNUSED)


def is_t5(config: Mapping[str, Any]) -> bool:
    """Whether its tensors and layers are those of a T5."""
    return config.get("model_type", "t5") in T5_FAMILIES


def layers_of(config: Mapping[str, Any]) -> int:
    """Of both stacks."""
    if is_t5(config):
        encoders = int(config.get("num_layers", _default(config, "num_layers")))
        return encoders + int(config.get("num_decoder_layers") or encoders)
    encoders = config.get("encoder_layers", config.get("num_layers"))
    decoders = config.get("decoder_layers", config.get("num_decoder_layers") or encoders)
    if not isinstance(encoders, int) or not isinstance(decoders, int):
        raise ValueError("it does not say how many layers encoder and decoder have")
    return encoders + decoders


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The class of transformers that trains it (config.json may name one without a head); None: none."""
    found = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    return found if isinstance(found, str) else None


def build(config: Mapping[str, Any], dtype: Any) -> PreTrainedModel:
    """The model that config.json describes, on the device in use. Raises whatever transformers does.

    Whether the head of a T5 is tied is as config.json says, from which transformers departs.
    """
    kind = CONFIG_MAPPING[config["model_type"]]
    model: PreTrainedModel = AutoModelForSeq2SeqLM.from_config(kind.from_dict(dict(config)), dtype=dtype)
    if getattr(model.config, "decoder_start_token_id", None) is None:
        raise ValueError("it has no decoder_start_token_id, with which every target begins")
    if is_t5(config) and declares_untied_head(config):
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


@functools.lru_cache(maxsize=8)
def _built(config: str) -> Layout:
    return built_layout(json.loads(config), build, layers_of)


def _default(config: Mapping[str, Any], key: str) -> Any:
    return (_MT5_DEFAULTS if config.get("model_type") == "mt5" else _T5_DEFAULTS)[key]


def _t5_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    def size(key: str, default: int | None = None) -> int:
        value = config.get(key, _default(config, key) if default is None else default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} is {value!r}")
        if key in _LAYERS and value > _MOST_LAYERS:
            raise ValueError(f"{key} is {value}, and no model has more than {_MOST_LAYERS} layers")
        return value

    width, hidden, heads = size("d_model"), size("d_ff"), size("num_heads")
    inner, vocabulary = heads * size("d_kv"), size("vocab_size")
    for key in ("decoder_start_token_id", "pad_token_id"):
        token = config.get(key)
        if token is not None and not (type(token) is int and 0 <= token < vocabulary):
            raise ValueError(f"{key} is {token!r}")
    for key in ("dropout_rate", "layer_norm_epsilon"):
        share = config.get(key, 0)
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"{key} is {share!r}")
    buckets, layers = size("relative_attention_num_buckets"), size("num_layers")
    decoders = layers if config.get("num_decoder_layers") is None else size("num_decoder_layers", layers)
    gated = str(config.get("feed_forward_proj", _default(config, "feed_forward_proj"))).startswith("gated")
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


# -- flops -------------------------------------------------------------------------------------------------------------
# FLOPs that a seq2seq model needs for rows of given lengths: of its matrix products, two for each multiplication.
#
# An [m, k] x [k, n] product is 2·m·n·k. Attention scores and values count for every pair of positions, in the decoder
# also for those that the causal mask hides: the kernels that take a position bias skip none. Backward is twice
# forward. Softmax, norms, activations, optimizer and padding are not counted: the figure is what the model needs, not
# what was spent, so MFU (of it) is the same question for every implementation. What recomputation repeats is reported
# apart.

_BLOCK = re.compile(r"\b(encoder|decoder)\.(?:block|layers)\.(\d+)\.")
_CROSS = re.compile(r"\.(?:EncDecAttention|encoder_attn)\.")
_QUERY = re.compile(r"\.(?:q|q_proj)\.weight$")
_OF_ENCODED = re.compile(r"\.(?:k|v|k_proj|v_proj)\.weight$")


@dataclass(frozen=True)
class PairFlops(TokenFlops):
    """Of an encoder and a decoder."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> PairFlops:
        """Of a whole model: gated or not, head tied or not. Raises Rejected (`bad_config`)."""
        layout = layout_of(config)
        head = layout.shapes[layout.embedding if layout.tied else layout.head]
        blocks = {name: shape for name, shape in layout.shapes.items() if _block(name) is not None}
        return cls._from_blocks(blocks, float(2 * head[0] * head[1]))

    @classmethod
    def recomputed(cls, config: Mapping[str, Any], every: int) -> PairFlops:
        """Of the blocks whose activations are recomputed: every n-th of both stacks, counted through; 0: none."""
        shapes = layout_of(config).shapes
        blocks = {block for name in shapes if (block := _block(name)) is not None}
        encoders = sum(stack == "encoder" for stack, _ in blocks)

        def chosen(name: str) -> bool:
            block = _block(name)
            if block is None or not every:
                return False
            return (block[1] if block[0] == "encoder" else encoders + block[1]) % every == 0

        return cls._from_blocks({name: shape for name, shape in shapes.items() if chosen(name)}, 0.0)

    @classmethod
    def _from_blocks(cls, shapes: Mapping[str, tuple[int, ...]], head: float) -> PairFlops:
        per_input, per_target, pairs = 0.0, head, {"encoder": 0.0, "cross": 0.0, "decoder": 0.0}
        for name, shape in shapes.items():
            if len(shape) != 2 or "relative_attention_bias" in name:
                continue  # norms and the table of position biases are no matrix products
            block = _block(name)
            assert block is not None
            # Keys and values of the cross-attention are made of what the encoder says.
            if block[0] == "encoder" or (_CROSS.search(name) and _OF_ENCODED.search(name)):
                per_input += 2 * shape[0] * shape[1]
            else:
                per_target += 2 * shape[0] * shape[1]
            if _QUERY.search(name):
                kind = "cross" if _CROSS.search(name) else block[0]
                pairs[kind] += 4 * shape[0]  # scores and values, 2 each, over all heads
        return cls(per_input, per_target, pairs["encoder"], pairs["cross"], pairs["decoder"])


def _block(name: str) -> tuple[str, int] | None:
    """The stack, and the number in it."""
    found = _BLOCK.search(name)
    return (found[1], int(found[2])) if found else None
