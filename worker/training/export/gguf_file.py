"""GGUF: one file for llama.cpp, with the tokenizer in it, and the program that it is verified with.

Tensors are written one at a time, so that a model need not fit into memory.
"""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from transformers import AutoTokenizer

from jobs.errors import Rejected
from worker.training.export.formats import EXACT, Scores, Unsupported
from worker.training.export.held_out import Float64, HeldOutRow
from worker.training.models.model_files import SINGLE, read_config
from worker.training.tasks.task import Config

if TYPE_CHECKING:
    from gguf import GGUFWriter

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
}
"""Regular expressions by which byte-level BPE first cuts a text, and llama.cpp's names for them."""


# -- the tokenizer as GGUF describes it ----------------------------------------------------------------------


def write_tokenizer(writer: GGUFWriter, source: Path, vocabulary: int) -> None:
    """Tokens, merges and special tokens. Raises Unsupported.

    They are those of the tokenizer that transformers makes of the folder: for some models (Qwen2, for one) it takes
    tokens and merges of tokenizer.json, and has rules of its own by which a text is first cut.
    """
    import gguf

    tokenizer: Any = AutoTokenizer.from_pretrained(source, local_files_only=True)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise Unsupported(f"its tokenizer is {model['type']}, and GGUF is written for BPE")
    tokens = [f"[PAD{number}]" for number in range(vocabulary)]
    types = [gguf.TokenType.UNUSED] * vocabulary
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores(tokens, merges))
        writer.add_add_space_prefix(_puts_space_first(content))
        for number, token in enumerate(tokens):
            if token.startswith("<0x") and len(token) == 6:
                types[number] = gguf.TokenType.BYTE
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(content))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    if model.get("unk_token") is not None:
        types[model["vocab"][model["unk_token"]]] = gguf.TokenType.UNKNOWN
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
    ):
        if number is not None:
            add(number)
    begins = tokenizer("a").input_ids
    writer.add_add_bos_token(len(begins) > 1 and begins[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(len(begins) > 1 and begins[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """[tokens] the earlier a token is merged, the higher; single characters and what is not merged stand at the end."""
    rank = {first + second: -float(number) for number, (first, second) in reversed(list(enumerate(merges)))}
    return [rank.get(token, -1e6) for token in tokens]


def _puts_space_first(content: dict[str, Any]) -> bool:
    """Whether a text gets a space in front."""
    parts = [part for part in (content.get("normalizer"), content.get("pre_tokenizer")) if part]
    parts += [each for part in parts for each in part.get("normalizers", part.get("pretokenizers", []))]
    return any(
        part["type"] == "Prepend" or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        for part in parts
    )


def _pre_tokenizer(content: dict[str, Any]) -> str:
    """llama.cpp's name for how a text is first cut."""
    before = content.get("pre_tokenizer") or {}
    parts = before.get("pretokenizers", [before])
    if [part.get("type") for part in parts] == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if [part.get("type") for part in parts] == ["Split", "ByteLevel"]:
        found = PATTERNS.get(parts[0]["pattern"].get("Regex", ""))
        if found is not None:
            return found
    raise Unsupported("llama.cpp has no name for how its tokenizer first cuts a text")


CERTAIN = 1e4
"""Added to the logit of a given token, so that it is the one that is sampled. What is reported of it is computed of the
logits before."""


# -- llama.cpp, in this process ------------------------------------------------------------------------------


class Runtime:
    """A model, opened on the CPU with everything besides its weights in fp32."""

    def __init__(self, file: Path, context: int) -> None:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_ctx, settings.n_gpu_layers = context, 0
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.warmup = settings.fit_params = settings.ui = False
        settings.verbosity, settings.cache_ram_mib, settings.cpuparams.n_threads = -1, 0, 1
        self._key = secrets.token_hex(16)
        settings.api_keys = [self._key]
        try:
            self._server = xllamacpp.Server(settings)
        except Exception as error:  # of C++, without a type of its own
            raise Rejected(f"llama.cpp does not open the file: {error}", code="export_differs") from error

    def log_probabilities(self, row: HeldOutRow, progress: Callable[[], None]) -> Float64:
        """[tokens] of the row's target, one after the other; NaN for one that ends inside a character, for llama.cpp
        says nothing of it."""
        assert row.places is not None, "the model is causal"
        found = []
        for place, token in zip(row.places, row.target, strict=True):
            answer = self._server.handle_completions(
                {
                    "prompt": list(row.input[:place]), "n_predict": 1, "n_probs": 1, "temperature": 0.0,
                    "logit_bias": [[token, CERTAIN]], "cache_prompt": True,
                }
            )  # fmt: skip
            if "choices" not in answer:
                raise Rejected(f"llama.cpp answers: {answer}", code="export_differs")
            said = answer["choices"][0]["logprobs"]
            if said is None:
                found.append(np.nan)
            else:
                [sampled] = said["content"]
                assert sampled["id"] == token, "the token that was given"
                found.append(sampled["logprob"])
            progress()
        return np.array(found, np.float64)

    def check_tokenizer(self, source: Path, rows: Sequence[HeldOutRow]) -> int:
        """How many held-out texts it cuts as transformers does: all. Raises Rejected (`export_differs`)."""
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        for row in rows:
            text = tokenizer.decode(list(row.input), skip_special_tokens=False)
            assert isinstance(text, str)
            ours, theirs = tokenizer(text, add_special_tokens=False).input_ids, self._tokens(text)
            if ours != theirs:
                at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
                raise Rejected(
                    f"llama.cpp cuts a held-out text into {len(theirs)} tokens, and the model's tokenizer into "
                    f"{len(ours)}; they differ from token {at} on: {tokenizer.decode(ours[at : at + 8])!r}",
                    code="export_differs",
                    hint="export to ctranslate2 or merged, which take the tokenizer as it is",
                )
        return len(rows)

    def _tokens(self, text: str) -> list[int]:
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize",
            json.dumps({"content": text, "add_special": False, "parse_special": True}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [int(token) for token in json.load(answer)["tokens"]]


if TYPE_CHECKING:
    from gguf import GGUFWriter

FILE = "model.gguf"
Float32 = npt.NDArray[np.float32]
GELU_TABLE = 1e-3
"""llama.cpp looks GELU up in a table of fp16, also where everything else is fp32."""
LIMITS = {"f32": EXACT, "bf16": 0.05, "q8_0": 0.1}
"""Nats a token. llama.cpp multiplies weights in bf16 with activations that it rounds to bf16, and those in q8_0 with
activations that it rounds to 8 bits; the weights themselves, in bf16 and f32, are compared bit for bit."""


# -- the file ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How llama.cpp's model differs from that of transformers."""

    architecture: str
    """Of the package gguf."""
    interleaved: bool = False
    """It rotates neighbouring numbers of queries and keys, so that their rows are put in another order."""
    norm_offset: float = 0.0
    """transformers adds it to the weights of norms; llama.cpp wants it in them."""
    gelu: bool = False


FAMILIES = {
    "llama": Family("LLAMA", interleaved=True),
    "mistral": Family("LLAMA", interleaved=True),
    "qwen2": Family("QWEN2"),
    "qwen3": Family("QWEN3"),
    "gemma": Family("GEMMA", norm_offset=1.0, gelu=True),
    "phi3": Family("PHI3"),
}


class Gguf:
    """See `Format`."""

    packages = ("gguf", "xllamacpp")

    @property
    def runtime(self) -> str:
        """See `Format`."""
        return f"llama.cpp (xllamacpp {version('xllamacpp')})"

    def check(self, config: Config) -> None:
        """See `Format`."""
        rope = rope_of(config)
        if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
            raise Unsupported(f"its rope_type {rope['rope_type']} is not written here")

    def write(self, source: Path, folder: Path, dtype: str, progress: Callable[[], None]) -> None:
        """See `Format`."""
        import gguf

        config = read_config(source, source.name)
        family = FAMILIES[config["model_type"]]
        writer = gguf.GGUFWriter(folder / FILE, gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, family.architecture)])
        write_settings(writer, config, dtype)
        write_tokenizer(writer, source, int(config["vocab_size"]))
        with safe_open(source / SINGLE, framework="pt") as weights:
            named = tensors(weights, config)
            types = {name: type_of(name, shape, dtype) for name, (shape, _) in named.items()}
            for name, (shape, _) in named.items():
                kind = types[name]
                stored = gguf.quant_shape_to_byte_shape(shape, kind)
                plain = kind == gguf.GGMLQuantizationType.F32
                writer.add_tensor_info(
                    name, shape if plain else stored, np.dtype(np.float32 if plain else np.uint8),
                    4 * int(np.prod(shape)) if plain else int(np.prod(stored)), raw_dtype=None if plain else kind,
                )  # fmt: skip
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, (_, read) in named.items():
                writer.write_tensor_data(gguf.quants.quantize(read(), types[name]))
                progress()
        writer.close()

    def scores(
        self, folder: Path, source: Path, dtype: str, rows: Sequence[HeldOutRow], progress: Callable[[], None]
    ) -> Scores:
        """See `Format`. Raises Rejected (`export_differs`) for a tensor or a tokenizer that is not the model's."""
        config = read_config(source, source.name)
        if dtype != "q8_0":
            check_tensors(folder / FILE, source, config, progress)
        runtime = Runtime(folder / FILE, max(len(row.input) for row in rows) + 8)
        texts = runtime.check_tokenizer(source, rows)
        found = [runtime.log_probabilities(row, progress) for row in rows]
        limit = LIMITS[dtype]
        if FAMILIES[config["model_type"]].gelu:
            limit = max(limit, GELU_TABLE)
        return Scores(found, limit, f"weights in {dtype}, cache in f32", texts)

    def usage(self, folder: Path) -> list[str]:
        """See `Format`."""
        return ["```sh", f"llama-cli -m {FILE}    # or: ollama, LM Studio and others that read GGUF", "```"]


def rope_of(config: Config) -> Mapping[str, Any]:
    """Rotary positions, as transformers 5 names them; `rope_theta` is always there."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    given.setdefault("rope_type", given.pop("type", "default"))
    given.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    return given


def head_size(config: Config) -> int:
    """Numbers of a head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def write_settings(writer: GGUFWriter, config: Config, dtype: str) -> None:
    """What llama.cpp has to know besides tensors and tokens."""
    import gguf

    rope, size = rope_of(config), head_size(config)
    positions, window = int(config["max_position_embeddings"]), config.get("sliding_window")
    if config["model_type"] == "phi3":
        writer.add_sliding_window(int(window or positions))
    elif window and config.get("use_sliding_window", True):
        positions = min(positions, int(window))  # beyond it llama.cpp would see what the model does not
    heads = int(config["num_attention_heads"])
    writer.add_context_length(positions)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(size * partial))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    kinds = {"f32": "ALL_F32", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(getattr(gguf.LlamaFileType, kinds[dtype]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def tensors(weights: Any, config: Config) -> dict[str, tuple[tuple[int, ...], Callable[[], Float32]]]:
    """By their names in GGUF: the shape of each, and what reads it. Raises Unsupported."""
    import gguf

    family = FAMILIES[config["model_type"]]
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.architecture), int(config["num_hidden_layers"]))
    heads = int(config["num_attention_heads"])
    of_heads = {"q_proj": heads, "k_proj": int(config.get("num_key_value_heads") or heads)}
    found: dict[str, tuple[tuple[int, ...], Callable[[], Float32]]] = {}
    for name in weights.keys():  # noqa: SIM118 - a safetensors file is no mapping
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise Unsupported(f"its tensor {name} has no name there")
        turned = of_heads.get(name.split(".")[-2]) if family.interleaved else None
        offset = family.norm_offset if "norm" in name else 0.0

        def read(name: str = name, turned: int | None = turned, offset: float = offset) -> Float32:
            values: Float32 = weights.get_tensor(name).float().numpy()
            return (values if turned is None else interleave(values, turned)) + np.float32(offset)

        found[new] = (tuple(weights.get_slice(name).get_shape()), read)
    rope = rope_of(config)
    if rope["rope_type"] == "llama3":
        factors = llama3_factors(rope, head_size(config))
        found["rope_freqs.weight"] = (factors.shape, lambda: factors)
    return found


def interleave(values: Float32, heads: int) -> Float32:
    """Rows of each head: first and second half, as transformers rotates them, in turns."""
    size = values.shape[0] // heads
    turned = values.reshape(heads, 2, size // 2, *values.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(turned.reshape(values.shape))


def llama3_factors(rope: Mapping[str, Any], size: int) -> Float32:
    """[size / 2] by what the frequencies are divided (transformers: `_compute_llama3_parameters`)."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    lengths = 2 * np.pi / frequencies
    low, high, whole = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = (whole / lengths - low) / (high - low)
    between = 1.0 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(lengths < whole / high, 1.0, np.where(lengths > whole / low, rope["factor"], between))
    return factors.astype(np.float32)


def type_of(name: str, shape: Sequence[int], dtype: str) -> Any:
    """Vectors stay in f32, as does what does not divide into the blocks of q8_0."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if len(shape) == 1 or dtype == "f32" or (dtype == "q8_0" and shape[-1] % 32):
        return kinds.F32
    return kinds.BF16 if dtype == "bf16" else kinds.Q8_0


def check_tensors(file: Path, source: Path, config: Config, progress: Callable[[], None]) -> None:
    """Raises Rejected (`export_differs`) unless each tensor, read back, is that of the model bit for bit."""
    import gguf

    written = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    with safe_open(source / SINGLE, framework="pt") as weights:
        named = tensors(weights, config)
        wrong = sorted(written.keys() ^ named.keys())
        for name in written.keys() & named.keys():
            values = gguf.quants.dequantize(written[name].data, written[name].tensor_type)
            if not np.array_equal(values.reshape(named[name][0]), named[name][1]()):
                wrong.append(name)
            progress()
    if wrong:
        raise Rejected(
            f"{len(wrong)} tensors of {file.name} are not those of the model: {', '.join(wrong[:5])}",
            code="export_differs",
            hint="a model in float16 is written to f32 without loss, and not to bf16",
        )
