"""`python -m worker.training push RUN_DIR ORG/NAME --license LICENSE`: a finished model, or an export, on the hub.

The token stands in the environment of this process alone: not on a command line, not in a file, not in what is said.
One commit holds all files, so that a repository has all of a model or nothing new. What the hub already has by its
sha256 is not sent again, which makes a repetition after an interruption short.
"""

from __future__ import annotations

import json
import logging
from io import BytesIO
from pathlib import Path

from jobs.disk.rundir import RunDir
from jobs.errors import Rejected
from jobs.export import PushRequest
from jobs.plan import Plan
from jobs.process.secrets import redact
from worker.training.journal import Journal
from worker.training.models.manifest import MANIFEST, README, delivered, verified_export
from worker.training.readme import model_card

ADAPTER_CONFIG = "adapter_config.json"
log = logging.getLogger("longhaul.trainer")


def push(run: RunDir, journal: Journal, asked: PushRequest, token: str | None) -> str:
    """Upload; returns the address of the commit.

    Raises Rejected (`no_model`, `model_damaged`, `no_export`, `export_damaged`, `base_is_local`, `no_token`,
    `hub_refused`, `hub_unreachable`).
    """
    journal.phase("load")
    if asked.export is None:
        folder = delivered(run, journal.progress)
    else:
        folder = verified_export(run, asked.export, journal.progress)
    plan = run.plan()
    check_base(run, folder)
    if not token:
        raise Rejected(
            "there is no HF_TOKEN in the environment of the worker `push`",
            code="no_token",
            hint="put a token with write access to the repository in HF_TOKEN (.env), and start that worker again",
        )
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    hub = HfApi(token=token)
    try:
        page = model_card((folder / README).read_text(), asked.license, base_license(hub, plan))
        hub.create_repo(asked.repository, private=not asked.public, exist_ok=True)
        journal.phase("save")
        operations = [
            CommitOperationAdd(
                str(file.relative_to(folder)),
                BytesIO(page.encode()) if file == folder / README else published(file, plan),
            )
            for file in sorted(folder.rglob("*"))
            if file.is_file() and file.name != MANIFEST
        ]
        done = hub.create_commit(asked.repository, operations, commit_message=f"Longhaul job {run.id}", num_threads=2)
    except (HfHubHTTPError, HFValidationError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = redact(str(error)).strip().splitlines()[0][:300]
        if status is not None and status >= 500:
            raise unreachable(said) from error
        raise Rejected(
            f"the hub does not take {asked.repository}: {said}",
            code="hub_refused",
            hint="check the name, and that HF_TOKEN may write to it",
        ) from error
    except Exception as error:
        # What HTTP, TLS or name resolution raise: the client's own library is not ours to import.
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
        known = OfflineModeIsEnabled, OSError, HfHubHTTPError
        if not isinstance(cause, known) and not type(cause).__module__.startswith("http"):
            raise
        raise unreachable(redact(f"{type(cause).__name__}: {cause}")) from error
    address: str = done.commit_url
    log.info("uploaded %d files of %s to %s", len(operations), folder.name, address)
    return address


def check_base(run: RunDir, folder: Path) -> None:
    """Raises Rejected (`base_is_local`) for adapters whose base model is a folder of this machine."""
    file = folder / ADAPTER_CONFIG
    if not file.exists():
        return
    base = json.loads(file.read_bytes())["base_model_name_or_path"]
    if base.startswith("/"):
        raise Rejected(
            "these adapters belong to a model that is on this machine alone: nobody else could open them",
            code="base_is_local",
            hint=f"longhaul export {run.id} --to merged, then push with --export merged",
        )


def published(file: Path, plan: Plan) -> Path | BytesIO:
    """The file; of adapters beside their merged model, without the path that their base model has on this machine."""
    if file.name != ADAPTER_CONFIG:
        return file
    config = json.loads(file.read_bytes())
    if not config["base_model_name_or_path"].startswith("/"):
        return file
    config["base_model_name_or_path"] = Path(plan.model.source).name
    return BytesIO(json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")


def base_license(hub: object, plan: Plan) -> str | None:
    """As the model card of a base model on the hub names it; None: it is none, or is not known."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    assert isinstance(hub, HfApi)
    if plan.model.revision is None:
        return None
    try:
        found = hub.model_info(plan.model.source.partition("@")[0], revision=plan.model.revision).card_data
    except HfHubHTTPError as error:
        log.warning("the licence of the base model is not known: %s", redact(str(error)).splitlines()[0])
        return None
    named = None if found is None else found.get("license")
    return named if isinstance(named, str) else None


def unreachable(why: str) -> Rejected:
    """The error for a hub that cannot be asked."""
    return Rejected(
        f"the hub cannot be asked: {why}",
        code="hub_unreachable",
        hint="check the network of the worker `push`, and repeat it: only what is missing is uploaded",
    )
