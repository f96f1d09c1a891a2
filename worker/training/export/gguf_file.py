"""GGUF: one file for llama.cpp. Tensors are written one at a time, so that a model need not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from jobs.errors import Rejected
from worker.training.export import llama_cpp
from worker.training.export.formats import EXACT, Scores, Unsupported
from worker.training.export.gguf_tokenizer import write_tokenizer
from worker.training.export.held_out import HeldOutRow
from worker.training.models.model_files import SINGLE, read_config
from worker.training.tasks.task import Config

if TYPE_CHECKING:
    from gguf import GGUFWriter

FILE = "model.gguf"
Float32 = npt.NDArray[np.float32]
GELU_TABLE = 1e-3
"""llama.cpp looks GELU up in a table of fp16, also where everything else is fp32."""
LIMITS = {"f32": EXACT, "bf16": 0.05, "q8_0": 0.1}
"""Nats a token. llama.cpp multiplies weights in bf16 with activations that it rounds to bf16, and those in q8_0 with
activations that it rounds to 8 bits; the weights themselves, in bf16 and f32, are compared bit for bit."""


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
        runtime = llama_cpp.Runtime(folder / FILE, max(len(row.input) for row in rows) + 8)
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
