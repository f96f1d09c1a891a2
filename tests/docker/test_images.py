"""What the images hold, what containers may do, and who can reach them."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.docker.engine import COMPOSE_FILE, OURS, Containers

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
SECRETS = ("LONGHAUL_API_KEY", "LONGHAUL_REDIS_URL", "DISCORD_WEBHOOK", "WANDB_API_KEY")


def test_the_service_image_holds_no_torch_and_adds_less_than_200_mb(containers: Containers) -> None:
    containers.docker("build", "-q", "-f", "Dockerfile.training", "--target", "base", "-t", "longhaul-test-base", ".")
    sizes = {
        name: int(containers.docker("image", "inspect", "-f", "{{.Size}}", name)) / 1e6
        for name in ("longhaul-test-base", containers.image("service"), containers.image("worker"))
    }
    containers.docker("rmi", "longhaul-test-base")
    print({name: f"{size:.0f} MB" for name, size in sizes.items()})
    assert sizes[containers.image("service")] - sizes["longhaul-test-base"] < 200
    found = (
        "import importlib.util as u; print([name for name in ('torch', 'transformers', 'wandb') if u.find_spec(name)])"
    )
    assert containers.inside("service", "python", "-c", found).strip() == "[]"
    assert containers.inside("service", "ls", "-A").split() == [
        "jobs",
        "longhaul",
        "requirements.service.lock",
        "service",
    ]


def test_the_worker_image_holds_what_it_runs_and_nothing_else(containers: Containers) -> None:
    assert containers.inside("worker", "ls", "-A").split() == [
        "jobs",
        "requirements.cuda.lock",
        "requirements.lock",
        "worker",
    ]


@pytest.mark.parametrize("service", ["redis", *OURS])
def test_containers_are_read_only_without_root_or_capability(containers: Containers, service: str) -> None:
    container = containers.container(service)
    host = container["HostConfig"]
    assert host["ReadonlyRootfs"] and host["Init"] and host["CapDrop"] == ["ALL"] and not host["CapAdd"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"] and not host["Privileged"]
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert host["LogConfig"]["Config"] == {"max-size": "10m", "max-file": "5"}
    if service != "redis":
        assert container["Config"]["User"] == f"{containers.settings['UID']}:{containers.settings['GID']}"
    # What the kernel says of the first process and of ours, whatever the engine was told.
    state = containers.inside(service, "sh", "-c", "cat /proc/[0-9]*/status")
    facts = [line.split() for line in state.splitlines()]
    assert {word for words in facts if words[0] == "Uid:" for word in words[1:]}.isdisjoint({"0"})
    assert {words[1] for words in facts if words[0] in ("CapEff:", "CapPrm:", "CapBnd:")} == {"0" * 16}
    assert {words[1] for words in facts if words[0] == "NoNewPrivs:"} == {"1"}
    refused = containers.inside(service, "sh", "-c", "touch /etc/x /usr/x /x", check=False)
    assert refused.count("Read-only file system") == 3


def test_no_secret_is_in_an_image_or_a_command_line_or_given_to_who_does_not_need_it(containers: Containers) -> None:
    key, password = containers.settings["LONGHAUL_API_KEY"], containers.settings["LONGHAUL_REDIS_PASSWORD"]
    for image in (containers.image("service"), containers.image("worker")):
        told = containers.docker("image", "inspect", image) + containers.docker("history", "--no-trunc", image)
        assert key not in told and password not in told and not any(name in told for name in SECRETS)
    holders = {name: set[str]() for name in SECRETS}
    for service in ("redis", *OURS):
        config = containers.container(service)["Config"]
        shown = str([config["Cmd"], config["Entrypoint"], config["Healthcheck"], config["Labels"]])
        shown += containers.inside(service, "sh", "-c", "cat /proc/[0-9]*/cmdline", check=False).replace("\0", " ")
        assert key not in shown and password not in shown
        names = {line.split("=", 1)[0] for line in config["Env"]}
        for name in names & set(SECRETS):
            holders[name].add(service)
    assert holders == {
        "LONGHAUL_API_KEY": {"service"},
        "LONGHAUL_REDIS_URL": set(OURS),
        "DISCORD_WEBHOOK": {"publish"},
        "WANDB_API_KEY": {"publish"},
    }


def test_redis_lets_in_its_own_user_only_and_that_one_may_not_look_around(containers: Containers) -> None:
    def asked(*words: str) -> str:
        return containers.inside("redis", *words, check=False)

    anybody = ("env", "-u", "REDISCLI_AUTH", "redis-cli")
    assert "NOAUTH" in asked(*anybody, "ping")
    assert asked("redis-cli", "--user", "longhaul", "ping").strip() == "PONG"
    for command in (
        ("CONFIG", "GET", "*"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("ACL", "LIST"),
        ("GET", "another"),
        ("MODULE", "LIST"),
    ):
        assert "NOPERM" in asked("redis-cli", "--user", "longhaul", *command)
    assert containers.inside("redis", "stat", "-c", "%a", "/dev/shm/users.acl").strip() == "600"


def test_what_a_script_wrote_into_redis_is_there_after_a_restart(containers: Containers) -> None:
    def asked(*words: str) -> list[str]:
        return containers.inside("redis", "redis-cli", "--user", "longhaul", *words).split()

    names = ("longhaul:one", "longhaul:other")
    asked("EVAL", "for _, key in ipairs(KEYS) do redis.call('SET', key, 'there') end", "2", *names)
    containers.compose("restart", "redis")
    containers.up()
    assert asked("MGET", *names) == ["there", "there"]
    asked("DEL", *names)


def test_only_the_api_is_published_and_on_loopback_only(containers: Containers) -> None:
    published = {name: containers.container(name)["NetworkSettings"]["Ports"] for name in ("redis", *OURS)}
    port = {"HostIp": "127.0.0.1", "HostPort": containers.settings["LONGHAUL_PORT"]}
    assert {name: [p for p in ports.values() if p] for name, ports in published.items()} == {
        "redis": [], "service": [[port]], "prepare": [], "worker": [], "generate": [], "publish": [],
    }  # fmt: skip
    # Redis and the trainer are on a network without a route out.
    networks = {name: set(containers.container(name)["NetworkSettings"]["Networks"]) for name in ("redis", "worker")}
    inside = f"{containers.project}_inside"
    assert networks == {"redis": {inside}, "worker": {inside}}
    assert containers.docker("network", "inspect", "-f", "{{.Internal}}", inside).strip() == "true"


def test_each_can_write_what_the_others_made(containers: Containers) -> None:
    places = {"/runs": OURS, "/models": OURS[1:3], "/prepared": OURS[1:3], "/cache": OURS[1:]}
    for place, services in places.items():
        folder = f"{place}/from-{services[0]}"
        containers.inside(services[0], "mkdir", folder)
        for service in services:
            containers.inside(service, "sh", "-c", f"echo {service} > {folder}/{service}")
        for service in services:
            containers.inside(service, "sh", "-c", f"for f in {folder}/*; do echo {service} >> $f || exit 1; done")
        words = containers.inside(services[0], "sh", "-c", f"cat {folder}/* && rm -r {folder}").split()
        assert len(words) == len(services) * (len(services) + 1)
    containers.inside("service", "sh", "-c", "echo x > /uploads/x")
    assert containers.inside("prepare", "cat", "/uploads/x").strip() == "x"
    for service in OURS[:3]:
        assert "Read-only file system" in containers.inside(service, "touch", "/data/x", check=False)
    for place in ("/models", "/prepared"):
        assert "Read-only file system" in containers.inside("generate", "touch", f"{place}/x", check=False)


def test_temporary_files_are_in_memory_and_gone_with_the_container(containers: Containers) -> None:
    for service in OURS[1:]:
        where = containers.inside(service, "python", "-c", "import tempfile; print(tempfile.mkdtemp())").strip()
        kind = containers.inside(service, "stat", "-f", "-c", "%T", where).strip()
        assert (Path(where).parent, kind) == (Path("/tmp"), "tmpfs")


@pytest.mark.parametrize("first", ["service", "worker"])
def test_a_new_volume_lets_any_user_in_whichever_image_mounts_it_first(containers: Containers, first: str) -> None:
    second = "worker" if first == "service" else "service"
    for place in ("uploads", "models", "prepared", "cache"):
        volume = f"{containers.project}-{first}-{place}"
        try:
            for name in (first, second):
                mount = [
                    "--volume",
                    f"{volume}:/{place}",
                    "--read-only",
                    "--user",
                    "4321:4321",
                    "--entrypoint",
                    "touch",
                ]
                containers.docker("run", "--rm", *mount, containers.image(name), f"/{place}/{name}")
        finally:
            containers.docker("volume", "rm", volume)


def test_the_doctor_runs_in_the_worker_image(containers: Containers) -> None:
    words = ("run", "--rm", "-T", "worker", "doctor", "--only", "machine", "--only", "resume", "--json")
    report = json.loads(containers.compose(*words).splitlines()[-1])
    status = {each["check"]: each["status"] for each in report["findings"]}
    assert (status["compiler"], status["resume"], status["driver"]) == ("PASS", "PASS", "SKIP")
    assert status["disk"] in ("PASS", "WARN"), "as much as this machine has free"


def test_a_step_of_8_bit_adamw_compiles_inside_the_read_only_worker(containers: Containers) -> None:
    program = Path(__file__).with_name("eight_bit_step.py").read_text()
    began = time.monotonic()
    said = json.loads(containers.inside("worker", "python", "-c", program, timeout=600).splitlines()[-1])
    print(f"compiled and stepped in {time.monotonic() - began:.0f} s: {said}")
    assert said["uid"] == int(containers.settings["UID"]) != 0
    assert said["capabilities"] == "0" * 16 and said["root_is_read_only"]
    # Compiled here (one update for the one shape), by the compiler in the image, into the cache volume; the step after
    # it compiles nothing more.
    assert (said["compiled"], said["compiled_later"]) == (1, 0) and said["libraries"] > 0
    # Adam's first step moves every weight by the learning rate, 1e-2, rounded to bf16; its states are of one byte.
    assert said["changed"] > 0.99 and 0.009 < said["largest_change"] < 0.013
    one_byte = {f"{kind}.codes.weight": "torch.uint8" for kind in ("exp_avg", "exp_avg_sq")}
    assert said["states"] == one_byte | {f"{kind}.scale.weight": "torch.float32" for kind in ("exp_avg", "exp_avg_sq")}
    assert all(said["codes_set"])


def test_without_make_env_compose_says_what_to_do(containers: Containers) -> None:
    words = ["docker", "compose", "--env-file", "/dev/null", "-f", COMPOSE_FILE, "config", "--quiet"]
    done = subprocess.run(words, cwd=containers.home, env=containers.environment, capture_output=True, text=True)
    assert done.returncode != 0 and "run 'make env' first" in done.stderr


def test_make_up_returns_when_all_is_healthy_and_says_what_is_next(containers: Containers) -> None:
    environment = containers.environment | {"COMPOSE_PROJECT_NAME": containers.project}
    done = subprocess.run(["make", "up"], cwd=containers.home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    exported = f"export $(grep ^LONGHAUL_API_KEY= .env) LONGHAUL_URL={containers.url}"
    assert f"open {containers.url} in a browser, or: {exported}, then longhaul submit FILE --watch" in done.stdout
    assert "run --rm --build worker doctor" in done.stdout


@pytest.mark.parametrize(("file", "devices"), [("cpu", None), ("cdi", ["nvidia.com/gpu=all"])])
def test_the_files_for_a_cpu_and_for_cdi_change_only_the_devices(
    containers: Containers, file: str, devices: list[str] | None
) -> None:
    def read(*more: str) -> dict[str, Any]:
        files = [word for name in (COMPOSE_FILE, *more) for word in ("-f", name)]
        return dict(json.loads(containers.docker("compose", *files, "config", "--format", "json"))["services"])

    plain, changed = read(), read(f"docker-compose.{file}.yml")
    for name in ("worker", "generate"):
        resources = (changed[name].pop("deploy", None) or {}).get("resources", {})
        reserved = resources.get("reservations", {}).get("devices")
        assert (reserved and reserved[0]["device_ids"]) == devices
        del plain[name]["deploy"]
    for each in (*plain.values(), *changed.values()):
        each.get("environment", {}).pop("LONGHAUL_DEVICE", None)
    assert changed == plain


def test_health_checks_are_not_in_the_log(containers: Containers) -> None:
    containers.http.get(f"{containers.url}/workers", timeout=10)
    log = containers.compose("logs", "--no-log-prefix", "service")
    assert "/workers" in log and "/health" not in log
