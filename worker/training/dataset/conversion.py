"""Tokenizers of model folders without a tokenizer.json: made fast once, and compared with what they are made from.

transformers makes a fast tokenizer of the vocabulary, as its class for the family does. Several of these classes leave
out how sentencepiece normalizes a text (release 5.23: DeBERTa, mBART, Pegasus), without a word. So its tokens are
compared with those of the slow tokenizer: sentencepiece itself, WordPiece or byte-level BPE in plain Python. Where they
differ, the normalization that the file describes is tried; where they still differ, the tokenizer is refused.

And tokenizers that read a line break as a space, where the job wants it kept: they get one more token.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.errors import Rejected
from worker.training.dataset.slow_tokenizers import (
    COPY_AGAIN,
    FAST,
    SENTENCEPIECE,
    TOKENIZER_CONFIG,
    VOCABULARIES,
    Slow,
    Tokens,
    check_vocabulary,
    refused,
    slow_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

GENERAL_CLASS = "PreTrainedTokenizerFast"
"""Takes a tokenizer.json as it is, in any release of transformers; the classes of families build another of it."""
_AS_IT_IS = frozenset(
    {
        "T5Tokenizer", "DebertaV2Tokenizer", "XLMRobertaTokenizer", "CamembertTokenizer", "MBartTokenizer",
        "MBart50Tokenizer", "PegasusTokenizer", "LlamaTokenizer", "GemmaTokenizer",
    }
)  # fmt: skip
"""Classes whose slow form gives a text to sentencepiece as it is (in lower case where it is told so)."""
_SPACE = "▁"
PROBES = (
    "The quick brown fox jumps over 13 lazy dogs, doesn't it?",
    "½ cup  of   crème fraîche, 180ºC; Phở Gà\u00a0costs $1,000.50",
    "ｆｕｌｌ ｗｉｄｔｈ  … “quotes” – dash",
    "a line\nanother\tand a tab",
    " space before and behind ",
    "日本語のテキスト 한국어 русский العربية",
    "UPPER lower MiXeD x2 http://a.b/c_d",
)
"""Texts on which tokenizers like to differ."""


def needs_conversion(folder: Path) -> bool:
    """Whether the tokenizer in a model folder has to be made of its vocabulary."""
    return not (folder / FAST).exists() and any((folder / name).exists() for name in VOCABULARIES)


def converted(folder: Path) -> PreTrainedTokenizerFast:
    """The fast tokenizer, which makes the slow one's tokens of PROBES. Raises Rejected (`tokenizer_conversion`)."""
    return _both(folder)[0]


def write_general(tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    """Write one that `converted` or `general` has made into a folder, where `from_pretrained` opens it as it is."""
    tokenizer.save_pretrained(str(target))
    config = target / TOKENIZER_CONFIG
    # As save_pretrained names it, older releases of transformers know no such class.
    content = json.loads(config.read_bytes()) | {"tokenizer_class": GENERAL_CLASS}
    config.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def check_converted(folder: Path, texts: Sequence[str]) -> None:
    """Refuse `tokenizer_conversion` where a converted tokenizer makes other tokens of a text than the slow one."""
    if needs_conversion(folder):
        _refuse_difference(*_both(folder), texts, folder)


def _both(folder: Path) -> tuple[PreTrainedTokenizerFast, Slow]:
    files = [file for file in folder.iterdir() if file.name in (*VOCABULARIES, TOKENIZER_CONFIG, "config.json")]
    states = [(file.name, file.stat()) for file in sorted(files)]
    return _made(folder, tuple((name, state.st_size, state.st_mtime_ns) for name, state in states))


@functools.lru_cache(maxsize=1)
def _made(folder: Path, state: tuple[tuple[str, int, int], ...]) -> tuple[PreTrainedTokenizerFast, Slow]:
    """Once for each state of these files."""
    check_vocabulary(folder)
    try:
        return _make(folder)
    except (MemoryError, Rejected):
        raise
    except Exception as error:  # a vocabulary that is damaged may raise anything
        reason = [*str(error).splitlines(), ""][0][:300]
        raise refused(folder, f"its vocabulary cannot be used: {type(error).__name__}: {reason}", COPY_AGAIN) from error


def _make(folder: Path) -> tuple[PreTrainedTokenizerFast, Slow]:
    from transformers import AutoTokenizer

    found: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not found.is_fast:
        raise refused(folder, f"transformers has no fast form of its class {type(found).__name__}")
    slow = slow_tokenizer(folder, found)
    backend = found.backend_tokenizer
    made = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
    for change in (None, *_normalizations(folder, found)):
        backend.normalizer, backend.pre_tokenizer, backend.decoder = change or made
        if _difference(found, slow, PROBES) is None:
            return general(found), slow
    backend.normalizer, backend.pre_tokenizer, backend.decoder = made
    _refuse_difference(found, slow, PROBES, folder)
    raise AssertionError("they differ")


def general(found: Any) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer, in the class that takes it as it is."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=found.backend_tokenizer,
        model_max_length=found.model_max_length,
        padding_side=found.padding_side,
        truncation_side=found.truncation_side,
        model_input_names=found.model_input_names,
        clean_up_tokenization_spaces=found.clean_up_tokenization_spaces,
        chat_template=found.chat_template,
        **found.special_tokens_map,
    )


# -- line breaks -----------------------------------------------------------------------------------------------------

LINE_BREAK = "\n"


def reads_as_space(tokenizer: Tokenizer, *between: str) -> bool:
    """Whether each of these is one space to it."""
    plain, *others = (tokenizer.encode(f"one{each}two").ids for each in (" ", *between))
    return all(other == plain for other in others)


def add_line_break(tokenizer: Tokenizer) -> None:
    """Give it one more token, for the line break. Raises Rejected (`line_breaks_lost`) where it then does not write
    each line of a text as it would write that line alone."""
    from tokenizers import AddedToken, decoders

    def spelled(text: str) -> str:
        return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids))

    tokenizer.add_tokens([AddedToken(LINE_BREAK, normalized=False)])
    # To these tokenizers the first word of a line, too, begins with a space.
    steps = [*filter(None, [tokenizer.decoder]), decoders.Fuse(), decoders.Replace(f"{LINE_BREAK} ", LINE_BREAK)]
    tokenizer.decoder = decoders.Sequence(steps)
    lines = ("one two", "", "three")
    if spelled(LINE_BREAK.join(lines)) != LINE_BREAK.join(map(spelled, lines)):
        raise lost_line_breaks("with a token for the line break, the model's tokenizer writes other texts than it read")


def with_line_breaks(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast | None:
    """The same with a token for the line break; None: it tells line breaks from spaces as it is. Raises Rejected
    (`line_breaks_lost`)."""
    if not reads_as_space(tokenizer.backend_tokenizer, LINE_BREAK):
        return None
    changed = general(tokenizer)
    add_line_break(changed.backend_tokenizer)
    return changed


def lost_line_breaks(why: str) -> Rejected:
    """The error where line breaks cannot be kept."""
    return Rejected(
        f"data.keep_line_breaks: {why}",
        code="line_breaks_lost",
        param="data.keep_line_breaks",
        hint="leave it out; line breaks stay if you write them as a word in the rows, or train a causal model",
    )


# -- comparing -------------------------------------------------------------------------------------------------------


def _normalizations(folder: Path, fast: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Normalizer, pre-tokenizer and decoder that do what a file of sentencepiece says, in two ways."""
    file = next((folder / name for name in SENTENCEPIECE if (folder / name).exists()), None)
    if file is None or type(fast).__name__ not in _AS_IT_IS or getattr(fast, "split_by_punct", False):
        return
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import import_protobuf

    spec = import_protobuf().ModelProto.FromString(file.read_bytes()).normalizer_spec
    steps: list[Any] = [normalizers.Lowercase()] if getattr(fast, "do_lower_case", False) else []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex("^ | $"), "")]
    scheme = "always" if spec.add_dummy_prefix else "never"
    decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    yield (
        normalizers.Sequence(steps) if steps else None,
        pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme),
        decoder,
    )
    prefix = [normalizers.Prepend(_SPACE)] if spec.add_dummy_prefix else []
    yield (
        normalizers.Sequence([*steps, *prefix, normalizers.Replace(" ", _SPACE)]),
        None,
        fast.backend_tokenizer.decoder,
    )


def _difference(fast: Any, slow: Slow, texts: Sequence[str]) -> tuple[str, Tokens, Tokens] | None:
    """The first text of which both make other tokens, and those; texts that hold special tokens are left out.

    A Unigram model may cut `1000` into `00` and `0` or into `0` and `00`, which are as likely: that is no difference.
    """
    special = [str(token) for token in fast.all_special_tokens]
    compared: Callable[[Tokens], list[str]] = (
        sorted if type(fast.backend_tokenizer.model).__name__ == "Unigram" else list
    )
    for text in texts:
        if any(token in text for token in special):
            continue
        one, other = fast.convert_ids_to_tokens(fast(text, add_special_tokens=False)["input_ids"]), slow(text)
        if compared(one) != compared(other):
            return text, one, other
    return None


def _refuse_difference(fast: Any, slow: Slow, texts: Sequence[str], folder: Path) -> None:
    if (found := _difference(fast, slow, texts)) is not None:
        text, one, other = found
        at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        begin = max(0, at - 2)
        raise refused(
            folder,
            f"its fast form makes other tokens of {text[:80]!r} than its vocabulary: …{list(one[begin : at + 4])}…, "
            f"not …{list(other[begin : at + 4])}…",
        )
