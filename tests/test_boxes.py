"""What `make box` makes, and what the compose files do with it: one box lets another in, and nobody else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from redis.exceptions import NoPermissionError

from jobs.redis.connection import connect
from longhaul.children import redis_binary
from tests.support.boxes import make_box
from tests.support.redis_server import (
    RedisServer,
    compose_box_rules,
    compose_redis,
    compose_rules,
    free_port,
    speaks_tls,
)
from tests.support.stack import ROOT

HOST = "127.0.0.1"


def settings(file: Path) -> dict[str, str]:
    """Of an .env file."""
    return dict(line.split("=", 1) for line in file.read_text().splitlines() if line and line[0] != "#")


def compose(name: str) -> dict[str, Any]:
    """What is in a compose file."""
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return found


def verified(boxes: Path, *how: str) -> bool:
    """Whether Redis's certificate is good for a host, by the file that another box has."""
    words = ["-CAfile", str(boxes / "gpu2/ca.crt"), *how, str(boxes / "server.crt")]
    done = subprocess.run(["openssl", "verify", "-x509_strict", *words], capture_output=True, check=False)
    return done.returncode == 0


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, check=False)


def test_a_box_gets_a_password_of_its_own_and_what_it_needs_to_know_this_one(tmp_path: Path) -> None:
    boxes = make_box(tmp_path / "clone", HOST)
    given = settings(boxes / "gpu2/.env")
    password = given.pop("LONGHAUL_BOX_PASSWORD")
    ours = settings(boxes.parent / ".env")
    assert given == {
        "COMPOSE_FILE": "docker-compose.box.yml", "UID": ours["UID"], "GID": ours["GID"], "LONGHAUL_BOX": "gpu2",
        "LONGHAUL_FIRST_BOX": f"{HOST}:6380", "LONGHAUL_SHARED": "", "LONGHAUL_GPUS": "all",
    }  # fmt: skip
    hashed = hashlib.sha256(password.encode()).hexdigest()
    assert (boxes / "keys").read_text() == f"gpu2 {hashed}\n" and len(password) == 64
    modes = {
        name: (boxes / name).stat().st_mode & 0o777 for name in ("ca.key", "server.key", "gpu2/.env", "gpu2/ca.crt")
    }
    assert (boxes / "gpu2").stat().st_mode & 0o777 == 0o700
    assert modes == {"gpu2/ca.crt": 0o644, "ca.key": 0o600, "server.key": 0o640, "gpu2/.env": 0o600}
    assert verified(boxes, "-verify_ip", HOST) and not verified(boxes, "-verify_ip", "127.0.0.2")
    # The file that it copies works where compose reads it.
    needed = {"LONGHAUL_BOX_PASSWORD", "LONGHAUL_FIRST_BOX", "LONGHAUL_SHARED", "LONGHAUL_BOX", "UID", "GID"}
    asked = (ROOT / "docker-compose.box.yml").read_text()
    assert {name for name in needed if f"${{{name}:?" in asked} == needed


def test_another_box_keeps_the_first_and_another_address_keeps_the_ca(tmp_path: Path) -> None:
    boxes = make_box(tmp_path / "clone", HOST)
    ca, server, key = ((boxes / name).read_bytes() for name in ("ca.crt", "server.crt", "keys"))
    assert make(boxes.parent, "box", "NAME=gpu3").returncode == 0
    assert [(boxes / name).read_bytes() for name in ("ca.crt", "server.crt")] == [ca, server]
    assert (boxes / "keys").read_bytes().startswith(key)
    make_box(boxes.parent, "box.example.org")
    assert (boxes / "ca.crt").read_bytes() == ca and (boxes / "server.crt").read_bytes() != server
    assert verified(boxes, "-verify_hostname", "box.example.org") and verified(boxes, "-verify_ip", HOST)
    assert settings(boxes / "gpu2/.env")["LONGHAUL_FIRST_BOX"] == "box.example.org:6380"
    make_box(boxes.parent, "fd00::1", "gpu4")
    assert verified(boxes, "-verify_ip", "fd00::1") and verified(boxes, "-verify_hostname", "box.example.org")
    assert settings(boxes / "gpu4/.env")["LONGHAUL_FIRST_BOX"] == "[fd00::1]:6380"
    names = [line.split()[0] for line in (boxes / "keys").read_text().splitlines()]
    assert sorted(names) == ["gpu2", "gpu3", "gpu4"] and key not in (boxes / "keys").read_bytes(), (
        "gpu2 has a new password"
    )
    assert make(boxes.parent, "revoke-box", "NAME=gpu2").returncode == 0
    assert "gpu2" not in (boxes / "keys").read_text() and not (boxes / "gpu2").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["box"], "give the other box a name"),
        (["box", "NAME=GPU 2"], "give the other box a name"),
        (["box", "NAME=gpu2"], "say at which address"),
        (["box", "NAME=main", "HOST=10.0.0.1"], "main is the name of this box"),
        (["box", "NAME=keys", "HOST=10.0.0.1"], "boxes/keys is a file of 'make box' itself"),
        (["box", "NAME=hosts", "HOST=10.0.0.1"], "boxes/hosts is a file of 'make box' itself"),
        *(
            (["box", "NAME=gpu2", f"HOST={host}"], f"HOST={host} is neither a name nor an address")
            for host in ("192.168.1.10:6380", "[fd00::1]", "first box", "10.0.0.0/24")
        ),
        (["revoke-box", "NAME=gpu2"], "no box has the name 'gpu2'"),
        (["revoke-box", "NAME=.*"], "no box has the name '.*'"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, words: list[str], said: str) -> None:
    for file in ("Makefile", ".env.example", "pyproject.toml"):
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    (tmp_path / ".env").write_text("LONGHAUL_BOX=main\n")
    done = make(tmp_path, *words)
    assert done.returncode != 0 and said in done.stderr and not (tmp_path / "boxes").exists()


def test_where_openssl_fails_it_says_why_and_the_certificate_is_as_it_was(tmp_path: Path) -> None:
    boxes = make_box(tmp_path / "clone", HOST)
    before = {file: file.read_bytes() for file in boxes.rglob("*") if file.is_file()}
    done = make(boxes.parent, "box", "NAME=gpu3", "HOST=999.0.0.1")
    assert done.returncode != 0 and "bad ip address" in done.stderr and "openssl failed" in done.stderr
    assert {file: file.read_bytes() for file in boxes.rglob("*") if file.is_file()} == before


def test_a_box_may_use_the_same_commands_on_all_keys_but_those_of_requests(tmp_path: Path) -> None:
    keys, commands = compose_rules().split(" resetchannels "), compose_box_rules().split(" resetchannels ")
    assert keys[0] == "~longhaul:* ~rq:*" and keys[1] == commands[1]
    with (
        RedisServer(tmp_path, rules=compose_rules(), box_rules=compose_box_rules()) as server,
        connect(server.box_url) as box,
    ):
        for key in ("longhaul:job:job-1", "longhaul:leases", "longhaul:rebuilt", "longhaul:workers", "rq:queue:x"):
            box.delete(key)
        for key in ("longhaul:request:1", "longhaul:requests:push:clients", "longhaul:reconcile", "other"):
            with pytest.raises(NoPermissionError):
                box.delete(key)
            with pytest.raises(redis.ResponseError, match=r"ACL failure|NOPERM|can't access"):
                box.eval(f"return redis.call('DEL', '{key}')", 0)


def refusal(client: redis.Redis) -> type[redis.RedisError] | None:
    """How a server refuses; None: it does not."""
    try:
        client.ping()
    except redis.RedisError as error:
        return type(error)
    return None


@contextmanager
def container(tmp_path: Path, boxes: Path) -> Iterator[tuple[int, int]]:
    """Redis as compose starts it with both files, with places of this test. The ports: plain, and with TLS."""
    given = compose("docker-compose.training.yml")["services"]["redis"]
    plain, tls = free_port(), free_port()
    environment = {
        "PATH": os.environ["PATH"], "REDISCLI_AUTH": "a" * 64, "RULES": given["environment"]["RULES"],
        **compose_redis("docker-compose.boxes.yml"),
    }  # fmt: skip
    environment = {
        name: value.replace("/boxes/", f"{boxes}/").replace("6380", str(tls)) for name, value in environment.items()
    }
    shell, flags, script = given["entrypoint"]
    for theirs, here in {
        "$$": "$", "/dev/shm/": f"{tmp_path}/", "--dir /data": f"--dir {tmp_path} --port {plain}",
        "0.0.0.0": HOST, "exec redis-server": f"exec {redis_binary()}",
    }.items():  # fmt: skip
        script = script.replace(theirs, here)
    with subprocess.Popen([shell, flags, script], env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            with connect(f"redis://longhaul:{'a' * 64}@{HOST}:{plain}/0") as client:
                deadline = time.monotonic() + 120
                while True:
                    try:
                        assert client.ping()
                        break
                    except redis.ConnectionError:
                        assert process.poll() is None and time.monotonic() < deadline, "it does not come up"
            yield plain, tls
        finally:
            process.kill()


@pytest.mark.skipif(
    not speaks_tls(), reason="the server here has no TLS: install valkey-server or redis-server, 7.2 or newer"
)
def test_redis_takes_a_box_over_tls_until_it_is_revoked(tmp_path: Path) -> None:
    boxes = make_box(tmp_path / "clone", HOST)
    given = settings(boxes / "gpu2/.env")
    asked = compose("docker-compose.box.yml")["services"]["worker"]["environment"]["LONGHAUL_REDIS_URL"]
    for name, value in given.items():
        asked = asked.replace(f"${{{name}:?copy .env from the first box}}", value)
    asked = asked.replace("/ca.crt", str(boxes / "ca.crt"))  # its own copy is gone once it is revoked
    with container(tmp_path, boxes) as (plain, tls):
        url = asked.replace(":6380", f":{tls}")
        with connect(url) as box:
            assert box.set("longhaul:x", 1)
        for wrong, error in (
            (url.replace(given["LONGHAUL_BOX_PASSWORD"], "b" * 64), redis.AuthenticationError),
            (url.replace(HOST, "localhost"), redis.ConnectionError),  # another name than the certificate's
            (url.partition("?")[0], redis.ConnectionError),  # nobody has signed it that this machine trusts
        ):
            with connect(wrong) as refused:
                assert refusal(refused) is error
        with connect(f"redis://{HOST}:{tls}/0") as in_clear:
            assert refusal(in_clear) is redis.ConnectionError
        with connect(f"redis://longhaul:{'a' * 64}@{HOST}:{plain}/0") as ours:
            assert ours.get("longhaul:x") == b"1"
    assert make(boxes.parent, "revoke-box", "NAME=gpu2").returncode == 0
    with container(tmp_path, boxes) as (_, tls), connect(asked.replace(":6380", f":{tls}")) as revoked:
        assert refusal(revoked) is redis.AuthenticationError


def test_the_worker_of_another_box_is_that_of_the_first_but_for_what_it_mounts_and_reaches() -> None:
    first = compose("docker-compose.training.yml")["services"]["worker"]
    other = compose("docker-compose.box.yml")["services"]["worker"]
    differs = {"environment", "volumes", "user", "networks", "depends_on"}
    assert {key: first[key] for key in first.keys() - differs} == {key: other[key] for key in other.keys() - differs}
    assert {each["target"] for each in other["volumes"] if isinstance(each, dict) and not each.get("read_only")} == {
        "/runs"
    }


def test_folders_that_boxes_share_keep_their_owner_and_are_mounted_as_on_one_box() -> None:
    one, several = (compose(f"docker-compose.{name}.yml")["services"] for name in ("training", "boxes"))
    for name, service in one.items():
        shared = {tuple(each.split(":")) for each in service.get("volumes", []) if isinstance(each, str)}
        shared = {each for each in shared if each[0] in ("uploads", "models", "prepared")}
        found = several.get(name, {}).get("volumes", [])
        there = {(each["source"], each["target"], *(["ro"] if each.get("read_only") else [])) for each in found}
        assert name == "redis" or there == shared
        assert name == "redis" or all(each["volume"] == {"nocopy": True} for each in found)
