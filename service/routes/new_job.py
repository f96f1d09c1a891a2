"""`/new`: rows, a few questions, what a dry run finds out, and the button that makes the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fastapi import APIRouter, Request, Response

from jobs import answers
from jobs.data_names import DATA_SUFFIXES
from jobs.errors import NotFound, UserError
from jobs.events import EVENT_TYPES
from jobs.plan import Plan
from jobs.preview import FILE as PREVIEW
from jobs.preview import DataPreview
from jobs.redis.store import RawJob
from jobs.spec import JobSpec
from jobs.trainer_facts import Fault
from service.answers.conversion import job_answer
from service.files.uploads import Uploads
from service.jobs.actions import Actions
from service.pages.job_form import changes, fields, filled_in, groups, in_fields
from service.pages.render import Renderer
from service.routes.pages import page_routes

ASKED_FIRST = ("data.train", "data.input", "data.target", "model", "method.type", "training.epochs", "name")
"""Fields that stand before all others: the rows and their columns, three questions, and what it is called."""
UPLOADS_LISTED = 1000


def routes(actions: Actions, uploads: Uploads, render: Renderer) -> APIRouter:
    """`/new`, to be looked at; what is asked is asked of the API."""
    router = page_routes(render)

    def job_of(name: str) -> answers.Job:
        stored = actions.find(name)
        return job_answer(stored.parsed() if isinstance(stored, RawJob) else stored, runs_name=actions.runs.name)

    def dry_run(name: str) -> answers.Job:
        job = job_of(name)
        if not job["dry_run"]:
            raise UserError(f"job {name} is no dry run: to begin with its specification, open /new?clone={name}")
        return job

    def found_out(job: answers.Job | None) -> tuple[Plan | None, DataPreview | None]:
        if job is None:
            return None, None
        return actions.document(job["id"], "plan.json", Plan), actions.document(job["id"], PREVIEW, DataPreview)

    @router.get("/new")
    def new_job_page(
        request: Request,
        clone: str | None = None,
        data: str = "",
        check: str | None = None,
        shown: str | None = None,
        kind: RowKind | None = None,
        recognize: bool = False,
    ) -> Response:
        """The form, filled in as in the dry run `check`, as in the job `clone`, or with the rows `data`.

        `shown`: an older dry run, of which plan and preview are shown until `check` has its own. `kind`: what the rows
        were recognized as before. `recognize`: that is what `check` is for, and its model nobody's choice.
        """
        source = job_of(clone) if clone else None
        checked = dry_run(check) if check else None
        try:
            older = dry_run(shown) if shown else None
        except NotFound:  # deleted since
            older = None
        complete = checked is not None and checked["status"] == "validated"
        plan, preview = found_out(checked if complete else older)
        error = checked["error"] if checked else None
        if checked and error:
            hint = error.hint and in_fields(error.hint)
            error = error.model_copy(update={"message": in_fields(error.message), "hint": hint})
            checked = {**checked, "error": error}
            if recognize and error.code == "no_usable_columns" and checked["model"] != RECOGNIZERS[-1]:
                error = None  # the next recognizer is asked
        unread = found_out(checked)[1] if error else None
        if unread and unread.unrecognized:
            preview = unread
        if not complete and not (checked and older and checked["model"] == older["model"]):
            plan = None  # another model's says nothing about this one's
        began = checked or source
        given = filled_in(began["spec"]) if began and began["spec"] else {"data.train": data}
        given["model"] = began["model"] if began and not recognize else ""
        if complete and plan and preview:
            kind = row_kind(plan, preview)
        plain = [each for each in DATA_SUFFIXES if not each.endswith((".gz", ".zst"))]
        # A link on a page of another address, or in a chat, names rows but has nothing done with them.
        own = request.headers.get("sec-fetch-site") == "same-origin"
        begins = not checked and bool(source or (data and own))
        unattended = not any(each.stage == "check" and each.healthy for each in actions.store.workers.all())
        return render.page(
            request, "new.html", groups=groups(), fields=fields(), given=given, first=ASKED_FIRST,
            endings=DATA_SUFFIXES, plain_endings=plain, most_bytes=uploads.most, recognizers=RECOGNIZERS,
            uploaded=uploads.page("", UPLOADS_LISTED)[0], source=source, began_with=_minimal(source),
            changed=_changed(source, checked), begins=begins, checked=checked, recognize=recognize,
            unattended=unattended, in_fields=in_fields,
            stale=not complete and preview is not unread, error=error,
            at=_field_of(error), plan=None if recognize else plan, preview=preview, report=None,
            kind=kind, models=MODELS_TO_TRY[kind] if kind else {}, event_types=" ".join(EVENT_TYPES),
        )  # fmt: skip

    return router


def _field_of(error: Fault | None) -> str | None:
    """The field at which an error stands, as its parameter names it, or a part of it."""
    names = (error.param or "").split(".") if error else []
    while names and ".".join(names) not in fields():
        names.pop()
    return ".".join(names) or None


def _minimal(source: answers.Job | None) -> str:
    """JSON of what a job sets."""
    return source["spec"].model_dump_json(exclude_defaults=True) if source and source["spec"] else ""


def _changed(source: answers.Job | None, checked: answers.Job | None) -> list[tuple[str, str, str]]:
    """What a clone has changed so far."""
    specs: list[JobSpec] = [each["spec"] for each in (source, checked) if each and each["spec"]]
    return changes(*specs) if len(specs) == 2 else []


RowKind = Literal["labels", "whole", "pairs"]
"""Texts with labels; chats and plain text, learned as a whole; inputs with targets."""
RECOGNIZERS = ("builtin:roberta-tiny", "builtin:qwen-tiny")
"""Whose tasks together recognize all rows: a classifier those with labels, a language model the others."""
MODELS_TO_TRY: Mapping[RowKind, Mapping[str, str]] = {
    "labels": {
        "answerdotai/ModernBERT-base": "0.15 B, long texts",
        "FacebookAI/roberta-base": "0.12 B",
        "builtin:roberta-tiny": "tiny, to try things out",
    },
    "whole": {
        "Qwen/Qwen3-0.6B": "0.6 B",
        "Qwen/Qwen3-4B": "4 B",
        "Qwen/Qwen2.5-7B-Instruct": "7.6 B, with LoRA",
        "builtin:qwen-tiny": "tiny, to try things out",
    },
    "pairs": {
        "google/flan-t5-base": "0.25 B",
        "google/flan-t5-xl": "2.8 B",
        "Qwen/Qwen3-0.6B": "0.6 B, a language model",
        "builtin:t5-tiny": "tiny, to try things out",
    },
}
"""By name, with what tells them apart; the first one is taken where nobody chooses."""


def row_kind(plan: Plan, preview: DataPreview) -> RowKind:
    """What the rows of a checked job were taken for; where it writes, `labels_noticed` says that its targets look like
    labels."""
    if plan.task in ("classification", "regression") or preview.labels_noticed:
        return "labels"
    return "whole" if preview.sources[0].input is None else "pairs"
