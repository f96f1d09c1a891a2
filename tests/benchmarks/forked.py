"""A program that starts others, and those: what test_smoke forks."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile


def start(*words: str, folder: str | None = None) -> subprocess.Popen[str]:
    """This program with other arguments; in another folder it finds itself, too."""
    command = [sys.executable, "-m", "tests.benchmarks.forked", *words]
    environment = os.environ if folder is None else {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def starts() -> dict[str, object]:
    """What became of some of them."""
    said = json.loads(start("tells").communicate("a line\n")[0])
    found: dict[str, object] = {
        "argv": sys.argv[1:],
        "forked_by_the_same": said["parent"] == os.getppid(),
        "given": said["given"],
        "folder": said["folder"],
        "exit_code": start("ends").wait(),
    }
    for name, end in (("terminated", signal.SIGTERM), ("killed", signal.SIGKILL)):
        process = start("waits")
        assert process.stdout is not None
        fork = os.pidfd_open(int(process.stdout.readline()))
        process.send_signal(end)
        found[name] = process.wait()
        found["gone_with_its_client"] = bool(select.select([fork], [], [], 60)[0])
    own = subprocess.check_output([sys.executable, "-c", "import os; print(os.getppid())"], text=True)
    found["other_words_are_no_fork"] = int(own) == os.getpid()
    with tempfile.TemporaryDirectory() as folder:
        said = json.loads(start("tells", folder=folder).communicate("")[0])
    found["other_folders_are_no_fork"] = said["parent"] == os.getpid()
    return found


def main(argv: list[str]) -> int:
    match argv:
        case ["starts"]:
            print(json.dumps(starts()))
            return 3
        case ["tells"]:
            print(json.dumps({"parent": os.getppid(), "given": sys.stdin.read(), "folder": os.getcwd()}))
        case ["ends"]:
            return 7
        case ["waits"]:
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
            print(os.getpid(), flush=True)
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
