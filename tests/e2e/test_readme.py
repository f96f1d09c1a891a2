"""Every command of the README and of docs/ is executed: here, as it stands there, or by the test named beside it.

A command that is new or has changed there needs its line in COMMANDS, or a test fails.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.process.lifeline import WARM
from longhaul import Longhaul
from tests.support.local import STRANGER, Local
from tests.support.recipes import ROWS
from tests.support.stack import warm_of_all_tests

pytestmark = pytest.mark.timeout(2400)  # half a dozen jobs, one after the other
ROOT = Path(__file__).resolve().parents[2]
ROWS_KEPT = 64
"""Of the examples, in the folder where their job is submitted: the commands are meant here, not what they learn."""
SHORT = "--set training.epochs=1 --set evaluation.samples=0"
"""For the same reason: one epoch, and no texts."""


def ended(api: Longhaul) -> str:
    """The newest job that has succeeded."""
    return str(api.list(status="succeeded")["data"][0]["id"])


def submitted(api: Longhaul) -> str:
    """A job that has not ended: it waits for its check, or has come further."""
    return str(api.submit({"model": "builtin:t5-tiny", "data": {"train": "recipes.jsonl"}})["id"])


def queued(api: Longhaul) -> str:
    """A job whose training is about to begin."""
    job = submitted(api)
    assert "job.queued" in (event["type"] for event in api.events(job)), "it was not prepared"
    return job


def two(api: Longhaul) -> str:
    """Two jobs that docs/memory.md names."""
    job = {"model": "builtin:t5-tiny", "data": {"train": "recipes.jsonl"}}
    api.submit({**job, "name": "soups"})
    return str(api.submit({**job, "name": "soups-long", "training": {"epochs": 9}})["id"])


@dataclass(frozen=True)
class Here:
    """Executed here, in a folder that looks like a clone; beside a running service, if it speaks to one."""

    prints: str
    """What its output has, a regular expression."""
    job: Callable[[Longhaul], str] | None = None
    """Which job it is about: $ID."""
    instead: tuple[str, str] = ("…", "…")
    """What it cannot be run with, and what is put in its place."""


@dataclass(frozen=True)
class Elsewhere:
    """Executed by another test."""

    test: str


@dataclass(frozen=True)
class Never:
    """Not executed."""

    because: str


CREATED = r'"object":"fine_tuning.job"'
LOCAL = ".venv/bin/longhaul local --data examples"
COMMANDS: dict[str, Here | Elsewhere | Never] = {
    "make demo": Here(r"validation loss .* lower"),
    # PYTEST_ARGS=--version: all of what it would start is this very run.
    "make test": Here(r"pytest \d"),
    "make test-long": Here(r"pytest \d"),
    "make setup": Here(""),
    "make check": Never("it is not a test's business to lint"),
    LOCAL: Here(r"Longhaul is up"),
    ".venv/bin/longhaul submit examples/job.json --watch": Here(
        r"succeeded: the model of step", instead=("--watch", f"{SHORT} --watch")
    ),
    "curl -T recipes.jsonl localhost:8000/datasets/": Here(r'"uri":"dataset:recipes.jsonl"'),
    "curl -X POST localhost:8000/jobs -H 'Idempotency-Key: try-1' "
    """-d '{"model": "builtin:t5-tiny", "data": {"train": "dataset:recipes.jsonl"}}'""": Here(CREATED),
    "curl localhost:8000/jobs/$ID": Here(CREATED, ended),
    "curl -N -H 'Accept: text/event-stream' localhost:8000/jobs/$ID/events": Here(r"event: job.succeeded", ended),
    "curl -X POST localhost:8000/jobs/$ID/pause": Here(r'"status":"paused"|"requested":"pause"', queued),
    "curl localhost:8000/jobs/$ID/plan": Here(r'"resolved"', ended),
    "curl localhost:8000/jobs": Here(r'"has_more"'),
    "curl -g 'localhost:8000/jobs?limit=20&status=running&metadata[team]=kitchen'": Here(r'"has_more"'),
    "curl -C - -o model.tar localhost:8000/jobs/$ID/files/model": Here("", ended),
    "longhaul submit job.json --on cluster": Elsewhere("tests/e2e/test_slurm.py::test_pause_and_cancel_reach_the_node"),
    "longhaul show last": Elsewhere("tests/e2e/test_slurm.py::test_pause_and_cancel_reach_the_node"),
    "longhaul submit recipes.jsonl --set model=builtin:t5-tiny --watch": Here(
        r"succeeded: the model of step", instead=("--watch", f"{SHORT} --watch")
    ),
    "longhaul list --status running --status queued --where team=kitchen": Here(r"no such jobs"),
    "longhaul sweep examples/sweep.json --watch": Here(
        r"1 of 1: 1 succeeded",
        instead=("sweep.json", "sweep.json --set max_trials=1 --set job.training.epochs=1"),
    ),
    "longhaul sweep show last": Here(r"best .*macro_f1"),
    "longhaul sweep repeat last": Here(r"is running: 5 trials at most"),
    "curl -X POST localhost:8000/sweeps -d @examples/sweep.json": Here(r'"object":"sweep"'),
    "longhaul priority $ID 10": Here(r"is (validating|queued|running).*priority 10", submitted),
    "longhaul metrics $ID": Here(r"▁", ended),
    "longhaul clone $ID --set training.epochs=10 --resume": Here(r"is validating", ended),
    'longhaul try $ID "Roasted Peach Ice Cream"': Here(r"on the CPU .*tokens/s", ended),
    """longhaul try $ID --row '{"title": "Roasted Peach Ice Cream", "ingredients": ["peach", "cream"]}' --base""": Here(
        r"before training:", ended
    ),
    "longhaul predict $ID recipes.jsonl --out answers.jsonl": Here(
        r"64 rows answered", ended, instead=("--out", "--max-new-tokens 8 --out")
    ),
    """curl -X POST localhost:8000/jobs/$ID/generate -d '{"input": "Roasted Peach Ice Cream"}'""": Here(
        r'"object":"generation"', ended
    ),
    "curl -N -X POST localhost:8000/jobs/$ID/generate "
    """-d '{"row": {"title": "Peach Ice Cream", "ingredients": ["peach"]}, "stream": true}'""": Here(
        r"event: done", ended
    ),
    "longhaul download $ID --to my-model": Here(r"files, .* in my-model", ended),
    "longhaul export $ID --to ctranslate2 --dtype int8": Here(r"ctranslate2 \(int8\), .* held-out tokens", ended),
    "longhaul push $ID org/name --license apache-2.0": Elsewhere(
        "tests/training/export/test_asked.py::test_an_upload_needs_a_licence_and_its_token_is_nowhere_to_be_read"
    ),
    "longhaul doctor": Elsewhere("tests/e2e/test_doctor.py::test_the_command_examines_this_machine"),
    "docker compose run --rm --build worker doctor": Elsewhere(
        "tests/docker/test_images.py::test_the_doctor_runs_in_the_worker_image"
    ),
    "git clone … longhaul && cd longhaul": Never("the address is the reader's own"),
    "make env": Here(r"wrote \.env; made \./runs and \./data"),
    "$EDITOR .env": Here(r"LONGHAUL_API_KEY="),
    "cp …/recipes.jsonl data/": Here("", instead=("…", "examples")),
    "export $(grep ^LONGHAUL_API_KEY= .env)": Here(""),
    "make up": Elsewhere("tests/docker/test_images.py::test_make_up_returns_when_all_is_healthy_and_says_what_is_next"),
    """curl -X POST localhost:8000/jobs -H "Authorization: Bearer $LONGHAUL_API_KEY" -d '{
  "name": "chef", "data": {"train": "recipes.jsonl", "max_input_tokens": 256, "max_target_tokens": 256},
  "training": {"epochs": 5, "batch_size": 128, "learning_rate": 1e-4}}'""": Here(CREATED),
    "make box NAME=gpu2 HOST=192.168.1.10": Elsewhere(
        "tests/test_boxes.py::test_a_box_gets_a_password_of_its_own_and_what_it_needs_to_know_this_one"
    ),
    "make revoke-box NAME=gpu2": Elsewhere(
        "tests/test_boxes.py::test_another_box_keeps_the_first_and_another_address_keeps_the_ca"
    ),
    """sudo install -d -o "$(id -u)" -g "$(id -g)" /disks/longhaul/{runs,data,uploads,models,prepared}""": Never(
        "the place is the reader's own"
    ),
    "docker compose down": Never("it ends all containers"),
    "cp -a runs/. /srv/longhaul/runs/": Never("the place is the reader's own"),
    "cp -a data/. /srv/longhaul/data/": Never("the place is the reader's own"),
    'sudo iptables -I DOCKER-USER -m conntrack --ctstate NEW ! -d 192.168.1.10 -s "$(docker'
    " network inspect longhaul-box_default -f '{{(index .IPAM.Config 0).Subnet}}')\" -j DROP": Never(
        "it changes the firewall"
    ),
    'sudo iptables -I DOCKER-USER -m conntrack --ctstate NEW -s "$(docker netwo'
    "rk inspect longhaul_boxes -f '{{(index .IPAM.Config 0).Subnet}}')\" -j DROP": Never("it changes the firewall"),
    "sudo iptables -I DOCKER-USER -p tcp --dport 6380 -j DROP": Never("it changes the firewall"),
    "sudo iptables -I DOCKER-USER -p tcp --dport 6380 -s 192.168.1.11 -j RETURN": Never("it changes the firewall"),
    'docker run --rm --user "$(id -u):$(id -g)" -v longhaul_uploads:/from:ro '
    "-v /srv/longhaul/uploads:/to redis:8-bookworm cp -R /from/. /to/": Never("it needs a Docker engine and NFS"),
    "docker volume rm longhaul_uploads longhaul_models longhaul_prepared": Never("it needs a Docker engine and NFS"),
    "docker compose up -d && docker compose restart redis": Elsewhere(
        "tests/test_boxes.py::test_redis_takes_a_box_over_tls_until_it_is_revoked"
    ),
    "docker compose restart redis": Elsewhere(
        "tests/test_boxes.py::test_redis_takes_a_box_over_tls_until_it_is_revoked"
    ),
    "docker compose up -d": Elsewhere(
        "tests/test_boxes.py::test_the_worker_of_another_box_is_that_of_the_first_but_for_what_it_mounts_and_reaches"
    ),
    "longhaul plan job.json --png plan.png": Here(r"what was tried"),
    "longhaul plan job.json --hours 40": Here(r"what fits is not known"),
    "longhaul compare soups soups-long --png comparison.png": Here(r"training\.epochs +5 +9", two),
}
ALONE = ("make", "$EDITOR", "cp", "export")
"""First words of commands that need no service."""


def written(text: str) -> list[str]:
    """The commands of its sh blocks, without comments. One may go over several lines: to the end of its quotes."""
    found: list[str] = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        begun = ""
        for line in block.splitlines():
            begun += line
            try:
                shlex.split(begun, comments=True)
            except ValueError:  # inside quotes
                begun += "\n"
                continue
            found += [command] if (command := re.sub(r"(^|\s+)#.*", "", begun)) else []
            begun = ""
        assert not begun, f"quotes that do not end: {begun}"
    return found


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = list(dict.fromkeys(command for page in PAGES for command in written(page.read_text())))
"""Every command, in the order of the pages."""


def test_every_command_has_its_line_here() -> None:
    assert set(WRITTEN) == set(COMMANDS), "left: the pages, right: COMMANDS"


def test_what_is_executed_elsewhere_is_executed_there() -> None:
    for how in COMMANDS.values():
        if isinstance(how, Elsewhere):
            file, _, name = how.test.partition("::")
            tree = ast.parse((ROOT / file).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, how.test


def of_this_place(*, alone: bool) -> list[str]:
    """Commands that are executed here, in the order of the pages."""
    return [
        command
        for command in WRITTEN
        if isinstance(COMMANDS.get(command), Here) and command != LOCAL and (command.split()[0] in ALONE) == alone
    ]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone has, as far as the commands need it, after `make setup`: this very environment is its .venv."""
    folder = tmp_path_factory.mktemp("clone")
    for file in ("Makefile", ".env.example", "pyproject.toml", "requirements.lock", "requirements.dev.lock"):
        shutil.copy(ROOT / file, folder)
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        (folder / ".venv" / part.name).symlink_to(part)
    (folder / ".venv" / ".setup-stamp").unlink(missing_ok=True)
    (folder / ".venv" / ".setup-stamp").touch()
    return folder


def run(command: str, folder: Path, environment: dict[str, str], *, port: int = 8000) -> str:
    """What it prints; it has to succeed. `port` is put in the place of the usual one, which may be taken."""
    how = COMMANDS[command]
    assert isinstance(how, Here)
    done = subprocess.run(
        ["bash", "-c", command.replace(*how.instead).replace("localhost:8000", f"localhost:{port}")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, f"{command}: {done.returncode}\n{told}"
    assert re.search(how.prints, told), f"{command} printed\n{told}"
    return told


def test_commands_that_need_no_service(clone: Path) -> None:
    environment = {name: os.environ[name] for name in (*STRANGER, "LONGHAUL_TRACES") if name in os.environ}
    environment |= {"EDITOR": "cat", "PYTEST_ARGS": "--version", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    for command in of_this_place(alone=True):
        run(command, clone, environment)
    copied, rows = (clone / folder / "recipes.jsonl" for folder in ("data", "examples"))
    assert copied.read_bytes() == rows.read_bytes()


@pytest.fixture
def local(clone: Path) -> Iterator[Local]:
    """`longhaul local`, started as the README says, but on a free port."""
    rows = clone / "examples" / "recipes.jsonl"
    rows.write_text("".join(ROWS.read_text().splitlines(keepends=True)[:ROWS_KEPT]))
    shutil.copy(clone / "examples" / "job.json", clone)
    shutil.copy(rows, clone)
    environment = {"WANDB_MODE": "disabled", WARM: warm_of_all_tests().socket}
    with Local(clone, shlex.split(LOCAL), environment=environment) as local:
        yield local


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_commands_beside_a_running_service(local: Local) -> None:
    for command in of_this_place(alone=False):
        how = COMMANDS[command]
        assert isinstance(how, Here)
        environment = local.environment | {"PATH": f"{local.folder}/.venv/bin:{os.environ['PATH']}"}
        environment |= {"LONGHAUL_API_KEY": "", "ID": how.job(local.api) if how.job else ""}
        told = run(command, local.folder, environment, port=local.port)
        assert '"error": {' not in told and '"error":{' not in told, f"{command} was refused\n{told}"
        for job in list(local.api.all(status=("validating", "queued", "running", "paused"))):
            local.api.cancel(job["id"])
        for sweep in list(local.api.sweeps()):
            if sweep["status"] == "running":
                local.api.cancel_sweep(sweep["id"])
