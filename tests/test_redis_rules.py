"""What compose lets the user `longhaul` do in Redis: a whole job runs under exactly that; nothing else is allowed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import requests
import yaml

from jobs.redis.connection import connect
from longhaul.children import redis_binary
from tests.support.redis_server import RedisServer, compose_rules, free_port
from tests.support.stack import ROLES, ROOT, Stack, tiny_job


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server with compose's users."""
    with RedisServer(tmp_path_factory.mktemp("redis"), rules=compose_rules()) as server:
        yield server


def test_a_whole_job_runs_under_the_rules_and_is_never_refused_a_command(tmp_path: Path, data: Path) -> None:
    with Stack(tmp_path / "home", data=data, rules=compose_rules()) as stack:
        stack.start(*ROLES)
        run = stack.submit(tiny_job(), **{"Idempotency-Key": "once"})
        assert stack.wait_for_event(run, "job.succeeded", "job.failed").type == "job.succeeded", stack.logs()
        other = stack.submit(tiny_job())
        assert stack.post(other, "cancel").status_code == 200
        for path in ("/jobs", "/workers", "/metrics", "/health/ready", f"/jobs/{run.id}", f"/jobs/{run.id}/events"):
            assert requests.get(f"{stack.url}{path}", timeout=60).status_code == 200, path
        for file in stack.home.glob("*.log"):
            said = file.read_text()
            assert "NOPERM" not in said and "no permissions" not in said and "Traceback" not in said, said
        # Whatever was refused Redis itself has noted. (redis-py introduces itself with CLIENT, where the server knows
        # that word; it lives without.)
        with redis.Redis.from_url(stack.redis.admin_url) as admin:
            refused = {each["object"] for each in admin.acl_log() if each["username"] == "longhaul"}
            assert {each for each in refused if not each.startswith("client")} == set()
        for process in stack.processes.values():
            assert stack.redis.password not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert stack.redis.password not in Path(f"/proc/{stack.redis.pid}/cmdline").read_text()


def test_the_container_starts_a_server_with_that_user_and_shows_the_password_nowhere(tmp_path: Path) -> None:
    # compose's own script, with places of this test.
    compose = yaml.safe_load((ROOT / "docker-compose.training.yml").read_text())["services"]["redis"]
    shell, flags, script = compose["entrypoint"]
    port, password = free_port(), "a" * 64
    for ours, here in {
        "$$": "$", "/dev/shm/": f"{tmp_path}/", "--dir /data": f"--dir {tmp_path} --port {port}",
        "0.0.0.0": "127.0.0.1", "exec redis-server": f"exec {redis_binary()}",
    }.items():  # fmt: skip
        assert ours in script
        script = script.replace(ours, here)
    environment = {"PATH": os.environ["PATH"], "REDISCLI_AUTH": password, "RULES": compose["environment"]["RULES"]}
    with subprocess.Popen([shell, flags, script], env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            with connect(f"redis://longhaul:{password}@127.0.0.1:{port}/0") as client:
                deadline = time.monotonic() + 120
                while True:
                    try:
                        assert client.ping()
                        break
                    except redis.ConnectionError:
                        assert process.poll() is None and time.monotonic() < deadline, "it does not come up"
            with connect(f"redis://127.0.0.1:{port}/0") as nobody, pytest.raises(redis.AuthenticationError):
                nobody.ping()
            assert (tmp_path / "users.acl").stat().st_mode & 0o777 == 0o600
            words = Path(f"/proc/{process.pid}/cmdline").read_text()
            assert "-server" in words and password not in words
        finally:
            process.kill()


@pytest.mark.parametrize(
    "command",
    [
        "CONFIG GET *", "CONFIG SET dir /tmp", "DEBUG OBJECT longhaul:jobs", "MODULE LIST", "MODULE LOAD /tmp/x.so",
        "FLUSHALL", "FLUSHDB", "KEYS *", "ACL LIST", "ACL SETUSER longhaul allcommands", "SHUTDOWN", "SAVE", "BGSAVE",
        "MONITOR", "REPLICAOF 127.0.0.1 1", "SLAVEOF 127.0.0.1 1", "MIGRATE 127.0.0.1 1 longhaul:jobs 0 10",
        "SWAPDB 0 1", "CLIENT KILL ID 1", "CLIENT PAUSE 1", "SCRIPT FLUSH", "SCRIPT KILL",
        "PUBLISH rq:pubsub:worker {}", "SUBSCRIBE rq:pubsub:worker", "SORT longhaul:jobs", "RESTORE longhaul:x 0 x",
        "SLOWLOG GET", "LATENCY DOCTOR", "GET other", "SET other 1", "DEL other", "HGETALL longhaulish",
    ],
)  # fmt: skip
def test_what_the_user_may_not_do(server: RedisServer, command: str) -> None:
    # DEBUG and MODULE LOAD are refused to everybody since Redis 7, before anyone asks who it is.
    refused = pytest.raises(redis.ResponseError, match=r"(N|n)o permissions|^(DEBUG|MODULE) command not allowed")
    with connect(server.url) as client, refused:
        client.execute_command(*command.split())


def test_a_script_may_do_no_more_than_its_caller(server: RedisServer) -> None:
    with connect(server.url) as client:
        assert client.eval("return redis.call('SET', 'longhaul:x', 1)", 0) == b"OK"
        for call in ("'KEYS', '*'", "'FLUSHALL'", "'SET', 'other', 1"):
            with pytest.raises(redis.ResponseError, match=r"ACL failure|NOPERM|can't (run|access)"):
                client.eval(f"return redis.call({call})", 0)


def test_what_a_transaction_or_a_script_wrote_is_there_after_a_restart(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis", aof=True, rules=compose_rules())
    with server:
        with connect(server.url) as client:
            with client.pipeline(transaction=True) as together:
                together.set("longhaul:a", "1").set("longhaul:b", "2").execute()
            client.eval("redis.call('SET', 'longhaul:c', 3) redis.call('SET', 'longhaul:d', 4)", 0)
        server.stop()
        server.start()
        with connect(server.url) as client:
            assert client.mget([f"longhaul:{key}" for key in "abcd"]) == [b"1", b"2", b"3", b"4"]


def test_nobody_else_is_let_in(server: RedisServer) -> None:
    at = f"127.0.0.1:{server.port}/0"
    with connect(f"redis://{at}") as nobody, pytest.raises(redis.AuthenticationError):
        nobody.ping()
    for name, password in (("longhaul", "wrong"), ("default", ""), ("default", server.password)):
        with connect(f"redis://{name}:{password}@{at}") as client, pytest.raises(redis.AuthenticationError):
            client.ping()
