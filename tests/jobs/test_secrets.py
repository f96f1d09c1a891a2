"""What is taken out of a text as a secret, what is left as it is, and what that costs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from jobs.process import secrets
from jobs.process.secrets import HIDDEN, new_key, redact, register, where_secret

HEX_40 = "0123456789abcdef0123456789abcdef01234567"
HUB = "hf_" + "aB3dE6gH" * 4
KEY = "lh_" + ("aB3-dE6_gH1" * 4)[:43]


@pytest.fixture(autouse=True)
def _nothing_registered() -> Iterator[None]:
    before = secrets._registered
    register({})
    yield
    secrets._registered = before


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("posted to https://discord.com/api/webhooks/123456/aBc-dE_f", "aBc-dE_f"),
        ("https://ptb.discord.com/api/v10/webhooks/1/tok?wait=true", "tok"),
        ("Authorization: Bearer abc", "abc"),
        ("{'authorization': 'Bearer s3cr3t-key'}", "s3cr3t-key"),
        ("authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("curl -H 'x: bearer abcdefghijklmnop'", "abcdefghijklmnop"),
        ("redis://longhaul:pa%40ss@redis:6379/0 refused", "pa%40ss"),
        ("redis://:p@ss@redis", "p@ss"),
        ("git clone https://token123@github.com/x", "token123"),
        (f"401 for {HUB}", HUB[3:]),
        (f"with {KEY} in it", KEY[3:]),
        (f"/jobs/{KEY}/events", KEY[3:]),
        ("wandb_v1_abcDEF_123-456789", "abcDEF"),
        (f"WANDB_API_KEY={HEX_40}", HEX_40),
        (f"wandb login --relogin {HEX_40}", HEX_40),
        (f"wandb: Paste an API key: {HEX_40}", HEX_40),
        (f"machine api.wandb.ai login user password {HEX_40}", HEX_40),
        ("PASSWORD='two words'", "two words"),
        ("https://x.test/?api_key=abcdef&y=1", "abcdef"),
        ("X-API-Key: abcdefgh", "abcdefgh"),
        ("aws_secret_access_key = abcd/efgh+ijkl", "abcd/efgh+ijkl"),
        ("DISCORD_WEBHOOK=https://chat.test/hook/abc", "chat.test"),
        (json.dumps({"password": "s3cr3t", "n": 1}), "s3cr3t"),
        (json.dumps({"log": json.dumps({"api_key": "s3cr3t"})}), "s3cr3t"),
    ],
)
def test_a_secret_goes(text: str, secret: str) -> None:
    shown = redact(text)
    assert secret not in shown and HIDDEN in shown
    assert redact(shown) == shown


def test_keys_that_are_made_now_go() -> None:
    key, _ = new_key("anna")
    assert len(key) == len(KEY) and redact(f"with {key} in it") == f"with lh_{HIDDEN} in it"


@pytest.mark.parametrize(
    "text",
    [
        "sha256 " + "ab" * 32,
        f"google/flan-t5-xl@{HEX_40}",
        json.dumps({"revision": HEX_40, "model_sha256": "0" * 64, "wandb": {"project": "longhaul"}}),
        "/runs/job-06e1m8c4f0zt3qk5x9wb/checkpoints/step-00000500/model.safetensors",
        "job-06e1m8c4f0zt3qk5x9wb: 512 tokens, eos_token='</s>', max_input_tokens: 512",
        "http://127.0.0.1:8000/jobs?after=job-1&metadata[team]=kitchen",
        "redis://127.0.0.1:6379/0",
        "send the header `Authorization: Bearer …` (LONGHAUL_API_KEY of the service)",
        json.dumps({"error": {"code": "invalid_api_key", "message": "an API key is needed"}}),
        "Settings(api_key=none, api_keys_file=/etc/longhaul/keys)",
        "bearer authentication is needed",
        "a line without anything\nand another: mail@example.org",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_json_stays_json() -> None:
    said = {"password": "a" * 30, "n": 12345678, "secret": 12345678, "list": ["api_key:", "b", "password=", "c" * 20]}
    for form in (json.dumps(said), json.dumps(said, indent=1), json.dumps(said, separators=(",", ":"))):
        assert json.loads(redact(form)) == said | {"password": HIDDEN}


def test_values_of_the_environment_are_known_whatever_they_look_like() -> None:
    register(
        {
            "LONGHAUL_API_KEY": 'correct "horse" battery',
            "LONGHAUL_REDIS_URL": "redis://longhaul:st%C3%A4ple-gun@redis:6379/0",
            "DISCORD_WEBHOOK": "https://chat.test/hook/half-a-dozen",
            "WANDB_API_KEY": HEX_40,
            "HF_TOKEN": "short",
            "PATH": "/usr/bin:/bin",
        }
    )
    for text in (
        'said correct "horse" battery',
        json.dumps('correct "horse" battery'),
        "correct%20%22horse%22%20battery",
        "stäple-gun is wrong",
        json.dumps("st%C3%A4ple-gun"),
        "POST /hook/half-a-dozen",
        f"commit {HEX_40}",
    ):
        shown = redact(text)
        assert HIDDEN in shown and not any(word in shown for word in ("horse", "ple", "dozen", HEX_40)), shown
    assert redact("short /usr/bin redis:6379") == "short /usr/bin redis:6379"


@pytest.mark.parametrize(
    "piece",
    ["://", "://a:", "hf_", "lh_", "/webhooks/1", "bearer ", "authorization: ", "api_key", "api_key =", "password : '",
     "wandb login --a", "api key ", 'secret":"', "://" + "a" * 50, "a", " "],
)  # fmt: skip
def test_four_times_the_text_takes_about_four_times_as_long(piece: str) -> None:
    # Processor time of this thread; quadratic work would take sixteen times as long.
    def seconds(size: int) -> float:
        text = f"{(piece * size)[:size]}api_key://bearer hf_ lh_ authorization login"
        took = []
        for _ in range(3):
            began = time.thread_time()
            redact(text)
            took.append(time.thread_time() - began)
        return min(took)

    assert seconds(400_000) < 9 * seconds(100_000) + 0.01


@pytest.mark.parametrize("before", ["\n", "\t", "\x1b[32m", "x"])
def test_a_token_is_found_whatever_stands_before_it(before: str) -> None:
    text = f"my token:{before}{HUB}"
    assert HUB not in redact(text) and HUB not in redact(json.dumps({"a": text})) and HUB not in redact(repr(text))
    assert where_secret({"a": {"b": text}}) == "a.b"


def test_values_after_escaped_white_space_are_secrets() -> None:
    for text in ("password:\thunter2xx", "Authorization:\tBearer abcdefghijklmnopqrst", "api_key:\n  hunter2xx"):
        assert text.split()[-1] not in redact(json.dumps({"a": text}))
