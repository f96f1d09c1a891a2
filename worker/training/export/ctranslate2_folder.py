"""CTranslate2: its own converter, with the scale of the logits set to what the model does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from worker.training.export.formats import EXACT, Scores, Unsupported
from worker.training.export.held_out import Float64, HeldOutRow
from worker.training.models.model_files import CONFIG, GENERATION_CONFIG, SMALL
from worker.training.tasks.task import Config

# Read when it is imported. On CPUs of AMD it would take oneDNN, whose int8 products are less exact without VNNI.
os.environ.setdefault("CT2_USE_MKL", "1")
LOSS = 0.1
"""Nats a token that int8 may cost."""


class CTranslate2:
    """See `Format`."""

    packages = ("ctranslate2", "transformers")

    @property
    def runtime(self) -> str:
        """See `Format`."""
        return f"ctranslate2 {version('ctranslate2')}"

    def check(self, config: Config) -> None:
        """See `Format`."""
        from ctranslate2.converters.transformers import _MODEL_LOADERS

        kind = config["model_type"]
        if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind].__name__ not in _MODEL_LOADERS:
            raise Unsupported(f"its converter does not know {kind}")

    def write(self, source: Path, folder: Path, dtype: str, progress: Callable[[], None]) -> None:
        """See `Format`."""
        from ctranslate2.converters import TransformersConverter

        class Converter(TransformersConverter):  # type: ignore[misc]  # no types
            def load_model(self, model_class: Any, model_name_or_path: str, **more: Any) -> Any:
                model = super().load_model(model_class, model_name_or_path, **more)
                set_scale(model.config)
                if model.config.model_type == "bart" and not hasattr(model.config, "normalize_before"):
                    model.config.normalize_before = False  # it never is in transformers, whose configs no longer say so
                progress()
                return model

        try:
            Converter(str(source), low_cpu_mem_usage=True).convert(str(folder), quantization=dtype, force=True)
        except (NotImplementedError, ValueError, KeyError, AttributeError) as error:
            raise Unsupported(f"its converter says: {error}") from error
        progress()
        name_tokens(folder / CONFIG)
        for name in SMALL:
            if name not in (CONFIG, GENERATION_CONFIG) and (source / name).exists():
                shutil.copyfile(source / name, folder / name)

    def scores(
        self, folder: Path, source: Path, dtype: str, rows: Sequence[HeldOutRow], progress: Callable[[], None]
    ) -> Scores:
        """See `Format`."""
        import ctranslate2

        # bfloat16 weights are widened: what is compared is the file, not the arithmetic of this machine.
        compute_type = "int8" if dtype == "int8" else "float32"
        settings = {"device": "cpu", "compute_type": compute_type, "intra_threads": 1}
        found: list[Float64] = []
        if rows[0].places is None:
            translator = ctranslate2.Translator(str(folder), **settings)
            words = AutoTokenizer.from_pretrained(source, local_files_only=True).convert_ids_to_tokens
            end = ctranslate2_end(folder)
            for row in rows:
                target = words(list(row.target))
                given = target[:-1] if target[-1] == end else target  # it adds the end by itself
                [scored] = translator.score_batch([words(list(row.input))], [given], max_input_length=0)
                assert scored.tokens[: len(target)] == target, "what was scored is what was given"
                found.append(np.array(scored.log_probs[: len(target)], np.float64))
                progress()
        else:
            generator = ctranslate2.Generator(str(folder), **settings)
            for row in rows:
                logits = np.array(generator.forward_batch([list(row.input)], return_log_probs=True), np.float64)
                found.append(logits[0, np.array(row.places) - 1, np.array(row.target)])
                progress()
        return Scores(found, LOSS if dtype == "int8" else EXACT, compute_type)

    def usage(self, folder: Path) -> list[str]:
        """See `Format`."""
        start = (
            "import ctranslate2\nfrom transformers import AutoTokenizer\n\n"
            'tokenizer = AutoTokenizer.from_pretrained(".")'
        )
        if (folder / "shared_vocabulary.json").exists() or (folder / "source_vocabulary.json").exists():
            run = (
                'model = ctranslate2.Translator(".")\n'
                'tokens = tokenizer.convert_ids_to_tokens(tokenizer("your input, written as in the table").input_ids)\n'
                "[result] = model.translate_batch([tokens], beam_size=1, max_input_length=0)\n"
                "written = result.hypotheses[0]"
            )
        else:
            run = (
                'model = ctranslate2.Generator(".")\n'
                'tokens = tokenizer.convert_ids_to_tokens(tokenizer("your input, written as in the table").input_ids)\n'
                "[result] = model.generate_batch([tokens], sampling_topk=1, include_prompt_in_result=False)\n"
                "written = result.sequences[0]"
            )
        shown = "print(tokenizer.decode(tokenizer.convert_tokens_to_ids(written), skip_special_tokens=True))"
        return ["```python", *f"{start}\n{run}\n{shown}".split("\n"), "```"]


def set_scale(config: Any) -> None:
    """T5 scales its logits only where `config.json` says that its head is tied; mT5 never does.

    The converter scales where `tie_word_embeddings` is true, which transformers 5 makes it for every T5 and mT5; what
    T5's was it keeps as `scale_decoder_outputs`.
    """
    if config.model_type in ("t5", "mt5"):
        config.tie_word_embeddings = getattr(config, "scale_decoder_outputs", False)


def name_tokens(file: Path) -> None:
    """CTranslate2 does not open a config whose tokens are null, as the converter writes for tokenizers without them."""
    config = json.loads(file.read_bytes())
    for key, instead in (("bos_token", config.get("eos_token")), ("unk_token", "")):
        if config.get(key, instead) is None:
            config[key] = instead
    file.write_text(json.dumps(config, indent=2) + "\n")


def ctranslate2_end(folder: Path) -> str:
    """The token that ends a target."""
    end: str = json.loads((folder / CONFIG).read_bytes())["eos_token"]
    return end
