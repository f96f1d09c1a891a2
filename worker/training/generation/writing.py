"""One answer: what `transformers` generates, passed on as it is written; or the classes of a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from jobs.errors import Rejected
from jobs.generation import GenerateBody, LabelProbability, ModelName, Output
from jobs.plan import Plan
from jobs.spec import JobSpec
from jobs.text.units import format_score
from worker.training.network.model import LoadedModel
from worker.training.rows.characters import Rewriter
from worker.training.rows.chat import asked_turns
from worker.training.rows.row import Defect
from worker.training.rows.text import RowReader, Texts, input_template
from worker.training.tasks.layout import positions_of
from worker.training.tasks.task import Prompt, Task

# -- inputs ------------------------------------------------------------------------------------------------------------
# From what somebody asks to what the model reads: the job's own template, checks, tokenizer and chat format.


class Inputs:
    """Inputs of a job, by the tokenizer in a model folder."""

    def __init__(self, spec: JobSpec, plan: Plan, task: Task, folder: Path) -> None:
        """Raises Rejected (`tokenizer_unusable`, `chat_template`)."""
        self._task, self._data = task, spec.data
        tried = task.tried(task.tokenizer(folder), [], task.limits(spec.data))
        self._tokenizer = replace(tried, by_words=False)  # a shortcut, tried on a job's first rows only
        rewriter = Rewriter(self._tokenizer.rewrites()) if spec.data.normalize else None
        templates = dict.fromkeys((each.input, each.target, each.companions) for each in plan.data.sources_of(spec))
        self._readers = [
            RowReader(
                None if input is None else input_template(input),
                task.target_template(target, companions),
                rewriter,
            )
            for input, target, companions in templates
        ]

    def of(self, body: GenerateBody) -> list[Prompt | Defect]:
        """What the model reads, for each input. Of `rows`, one that cannot be used has its defect instead.

        Raises Rejected (`bad_input`).
        """
        if body.rows is not None:
            return [self._tried(row) for row in body.rows]
        try:
            if body.input is not None:
                return [self._prompt(self._readers[0].asked_text(body.input))]
            if body.row is not None:
                return [self._prompt(self._read(body.row))]
            assert body.messages is not None
            said, pairs = [each.model_dump(exclude_none=True) for each in body.messages], self._readers[0].reads_pairs
            turns = asked_turns(said, whole=pairs)
            assert turns is not None
            return [self._prompt(self._readers[0].asked(turns, body.tools))]
        except Defect as defect:
            raise Rejected(
                f"the input cannot be used: {defect}",
                code="bad_input",
                hint="give it as a row of the training data would be: `longhaul preview ID` shows some",
            ) from None

    def _tried(self, row: Mapping[str, Any]) -> Prompt | Defect:
        try:
            return self._prompt(self._read(row))
        except Defect as defect:
            return defect

    def _read(self, row: Mapping[str, Any]) -> Texts:
        """By the template of the first source that such a row fits. Raises the Defect of the first."""
        first: Defect | None = None
        for reader in self._readers:
            try:
                return reader.read_asked(row)
            except Defect as defect:
                first = first or defect
        assert first is not None
        raise first

    def _prompt(self, texts: Texts) -> Prompt:
        return self._task.asked(self._tokenizer, texts, self._data)


# -- writing -----------------------------------------------------------------------------------------------------------

DEFAULT_NEW_TOKENS = 256
"""Where neither the request nor the job's data say how many."""


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


class Answering:
    """A loaded model that answers. `text` is called with pieces of text as they are written."""

    def __init__(self, loaded: LoadedModel, name: ModelName, *, several: bool, new_tokens: int | None) -> None:
        """`several`: a text has any number of classes. `new_tokens`: where a request does not say how many."""
        self.loaded, self._name, self._several, self._new_tokens = loaded, name, several, new_tokens
        config = loaded.config
        if loaded.model.config.is_encoder_decoder:
            self._positions = positions_of(config, loaded.task.layout(config))
        else:  # also of rotary positions, which have no embedding
            self._positions = config.get("max_position_embeddings") or config.get("n_positions")

    def answer(
        self, index: int, prompt: Prompt | Defect, body: GenerateBody, text: Callable[[str], object],
        cancelled: Callable[[], bool],
    ) -> Output:  # fmt: skip
        """The answer to one input. Raises Cancelled, Rejected (`input_too_long`)."""
        if isinstance(prompt, Defect):
            return Output(
                model=self._name, index=index, input="", input_tokens=0, input_cut=False, text="", tokens=0,
                finish_reason="stop", error=str(prompt),
            )  # fmt: skip
        about = {
            "model": self._name, "index": index, "input": prompt.text, "input_tokens": len(prompt.ids),
            "input_cut": prompt.cut,
        }  # fmt: skip
        device = self.loaded.model.device
        ids = torch.tensor([prompt.ids], device=device)
        with torch.no_grad():
            if self.loaded.task.has_labels:
                logits = self._logits(ids, prompt.types)
                said = self._score(logits, text) if self.loaded.task.squares else self._classes(logits)
                return Output(**about, **said)
            written, reason = self._write(ids, body, text, cancelled)
        return Output(**about, **calls_in(prompt, written[0]), text=written[0], tokens=written[1], finish_reason=reason)

    def _write(
        self, ids: torch.Tensor, body: GenerateBody, text: Callable[[str], object], cancelled: Callable[[], bool]
    ) -> tuple[tuple[str, int], Literal["stop", "length"]]:
        model, most = self.loaded.model, body.max_new_tokens or self._new_tokens or DEFAULT_NEW_TOKENS
        taken = 1 if model.config.is_encoder_decoder else ids.shape[1]
        if self._positions is not None:
            if taken >= self._positions:
                raise Rejected(
                    f"the input has {taken:,} tokens, and the model knows {self._positions:,} positions",
                    code="input_too_long",
                    hint="shorten it",
                )
            most = min(most, self._positions - taken)
        ends = torch.tensor(model.generation_config.eos_token_id).reshape(-1)
        pieces = _Pieces(self._decoded, text, set(ends.tolist()), body.stop)
        generated = model.generate(  # type: ignore[operator]  # typed as Tensor | Module
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            num_beams=body.num_beams,
            use_cache=True,
            streamer=pieces if body.num_beams == 1 else None,
            stopping_criteria=StoppingCriteriaList([_Stop(lambda: pieces.stopped or cancelled())]),
            pad_token_id=model.generation_config.pad_token_id or 0,
            **body.sampling,
        )
        if cancelled():
            raise Cancelled
        tokens = generated[0, taken:].cpu()
        found = torch.isin(tokens, ends).nonzero()
        end = int(found[0]) if len(found) else len(tokens)  # behind it is padding, or nothing
        written = self._decoded(tokens[:end])
        final = until(body.stop, written)
        pieces.finish(final)
        return (final, end + len(found[:1])), "stop" if len(found) or final != written else "length"

    def _decoded(self, tokens: torch.Tensor) -> str:
        text = self.loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        return text if self.loaded.model.config.is_encoder_decoder else text.strip()

    def _logits(self, ids: torch.Tensor, types: Sequence[int]) -> torch.Tensor:
        given = {"token_type_ids": torch.tensor([types], device=ids.device)} if types else {}
        found: torch.Tensor = self.loaded.model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0]
        return found

    def _score(self, logits: torch.Tensor, text: Callable[[str], object]) -> dict[str, Any]:
        score = float(logits[0])
        text(said := format_score(score))
        return {"text": said, "tokens": 0, "finish_reason": "stop", "score": score}

    def _classes(self, logits: torch.Tensor) -> dict[str, Any]:
        logits = logits.float()
        likely = logits.sigmoid() if self._several else logits.softmax(-1)
        names: Any = self.loaded.model.config.id2label  # by number
        found = sorted(
            (LabelProbability(label=names[number], probability=each) for number, each in enumerate(likely.tolist())),
            key=lambda each: -each.probability,
        )
        chosen = [each.label for each in found if each.probability > 0.5] if self._several else [found[0].label]
        return {"text": "; ".join(chosen), "tokens": 0, "finish_reason": "stop", "labels": found}


def calls_in(prompt: Prompt, text: str) -> dict[str, Any]:
    """What a reply says besides its calls, and these; nothing where it calls nothing."""
    try:
        turn = prompt.called(text)
    except Rejected:  # the template takes too long for it: the reply is there in any case
        turn = None
    if turn is None:
        return {}
    calls = json.loads(turn.calls)
    for call in calls:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    thought, answer = turn.parts
    return {"content": turn.content if thought else answer, "tool_calls": calls}


class _Pieces(BaseStreamer):
    """Passes on what a text will begin with, whatever is written next: what its last two states have in common.

    But for characters that are incomplete at its end, whose bytes are tokens of their own: until it is whole, each is
    decoded as one or more U+FFFD. And but for the beginning of a text in `stop`.
    """

    def __init__(
        self,
        decode: Callable[[torch.Tensor], str],
        text: Callable[[str], object],
        ends: Collection[int],
        stop: Sequence[str],
    ) -> None:
        self._decode, self._text, self._ends, self._stop = decode, text, ends, stop
        self.stopped = False
        """Whether the text has one of `stop`."""
        self._begun = False
        self._tokens: list[int] = []
        self._before = self._sent = ""

    def put(self, value: torch.Tensor) -> None:
        """The prompt (of an encoder-decoder, what its decoder begins with) comes first."""
        if not self._begun:
            self._begun = True
            return
        self._tokens += [token for token in value.reshape(-1).tolist() if token not in self._ends]
        now = self._decode(torch.tensor(self._tokens))
        self.stopped = until(self._stop, now) != now
        self._send(self._surely(common_beginning(self._before, now).rstrip().rstrip("\ufffd").rstrip()))
        self._before = now

    def end(self) -> None:
        """Called by transformers; `finish` has the final text."""

    def finish(self, final: str) -> None:
        """The rest. What was sent is its beginning, or this is a fault."""
        if not final.startswith(self._sent):
            raise RuntimeError(f"streamed {self._sent[-50:]!r}, which {final[:200]!r} does not begin with")
        self._send(final)

    def _surely(self, text: str) -> str:
        """Without what follows a text of `stop`, and without what may be the beginning of one."""
        text = until(self._stop, text)
        begun = [size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size])]
        return text[: len(text) - max(begun, default=0)].rstrip()

    def _send(self, text: str) -> None:
        if len(text) > len(self._sent):
            self._text(text[len(self._sent) :])
            self._sent = text


def common_beginning(one: str, other: str) -> str:
    """What both texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))]


def until(stop: Sequence[str], text: str) -> str:
    """What is before the first of these texts; all where there is none."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


class _Stop(StoppingCriteria):
    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._wanted(), device=input_ids.device)
