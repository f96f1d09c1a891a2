"""Samples of several rows at once are those of each row by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.training.tasks.causal.families import VOCABULARY, model_of
from worker.training.tasks.causal.batches import CausalBatch

MOST = 12
PROMPTS = ([5, 9, 23, 40], [7, 31], [61, 3, 18])


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Every token is a word, the first one too, as in Llama 3 and GPT-2."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def batch() -> CausalBatch:
    """The prompts, each with a reply of one token."""
    width = max(map(len, PROMPTS)) + 1
    lengths = np.array([len(each) + 1 for each in PROMPTS])
    return CausalBatch(
        input_ids=torch.tensor([[*each, 1] + [0] * (width - len(each) - 1) for each in PROMPTS]),
        places=torch.from_numpy(np.arange(len(PROMPTS)) * width + lengths - 2),
        labels=torch.ones(len(PROMPTS), dtype=torch.int64),
        rows=np.arange(len(PROMPTS)),
        lengths=lengths,
        learned=[np.array([length - 1]) for length in lengths],
        target_width=8,
    )


@pytest.mark.parametrize("padding", [None, 0])
def test_a_text_ends_at_its_end_token_and_not_with_the_padding_behind(
    padding: int | None, tokenizer: PreTrainedTokenizerFast
) -> None:
    model: Any = model_of("llama").eval()
    settings = {"do_sample": False, "max_new_tokens": MOST}
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = padding, None
    alone = [model.generate(torch.tensor([each]), pad_token_id=0, **settings)[0, len(each) :] for each in PROMPTS]
    end = int(alone[0][3])
    model.generation_config.eos_token_id = [end]
    expected = []
    for text in alone:
        found = (text == end).nonzero()
        expected.append(str(tokenizer.decode(text[: int(found[0])] if len(found) else text)))
    assert len({len(text.split()) for text in expected}) > 1, "they end at different places"
    assert [one.generated for one in batch().samples(model, tokenizer, MOST)] == expected
