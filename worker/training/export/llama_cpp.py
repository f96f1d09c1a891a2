"""llama.cpp, in this process: log-probabilities of given tokens, and its own tokenizer."""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from jobs.errors import Rejected
from worker.training.export.held_out import Float64, HeldOutRow

CERTAIN = 1e4
"""Added to the logit of a given token, so that it is the one that is sampled. What is reported of it is computed of the
logits before."""


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
