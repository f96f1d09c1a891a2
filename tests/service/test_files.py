"""Files of a job: listed, downloaded whole or in ranges, folders as tars; and nothing that lies elsewhere."""

from __future__ import annotations

import http.client
import io
import itertools
import os
import random
import shutil
import socket
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import quote

import pytest
from pydantic import TypeAdapter

from jobs import answers
from service.edge import connections
from tests.service.raw import begin, exchange
from tests.service.running import Service
from tests.sinks.driving import until
from tests.support.processes import highest_memory
from tests.support.stack import Stack, tiny_job

SECRET = b"not yours"


@pytest.fixture
def job(service: Service) -> str:
    """A job with a model: three files, one of them long, in two folders."""
    job = service.submit()
    run = service.run(job).path
    (run / "model" / "onnx").mkdir(parents=True)
    (run / "model" / "config.json").write_bytes(b'{"a": 1}\n')
    (run / "model" / "model.safetensors").write_bytes(random.Random(1).randbytes(1_300_003))
    (run / "model" / "onnx" / "empty.txt").write_bytes(b"")
    return job


def content(folder: Path) -> dict[str, bytes]:
    return {f"{folder.name}/{file.relative_to(folder)}": file.read_bytes() for file in files(folder)}


def files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def unpacked(tar: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
        return {member.name: file.read() for member in archive if (file := archive.extractfile(member))}


# -- the list ---------------------------------------------------------------------------------------------------------


def test_files_are_listed_in_pages_and_each_can_be_had(service: Service, job: str) -> None:
    run = service.run(job).path
    seen: list[answers.RunFile] = []
    after = ""
    while True:
        page = TypeAdapter(answers.RunFileList).validate_python(
            service.get(f"/jobs/{job}/files?limit=2&after={after}").json()
        )
        seen += page["data"]
        if not page["has_more"]:
            break
        after = str(page["last_id"])
    paths = [file["path"] for file in seen]
    assert paths == sorted(paths)
    assert set(paths) == {
        "events.jsonl", "spec.json", "model/config.json", "model/model.safetensors", "model/onnx/empty.txt",
    }  # fmt: skip
    for file in seen:
        answer = service.get(f"/jobs/{job}/files/{file['path']}")
        assert answer.content == (run / file["path"]).read_bytes()
        assert len(answer.content) == file["bytes"]
        assert file["modified_at"] == (run / file["path"]).stat().st_mtime


def test_what_is_our_own_business_is_neither_listed_nor_had(service: Service, job: str) -> None:
    run = service.run(job).path
    kept_back = [
        "lock", "events.lock", "sinks/discord.json", "trainer.log", "tmp-x",
        "checkpoints/tmp-step-00000001/x", ".plan.json.1234", "model/.hidden", "attempts/tmp-1/x", "model/a b",
        "model/ü", 'model/a"b', "model/a\nb", "model/a\\b",
    ]  # fmt: skip
    before = service.get(f"/jobs/{job}/files").json()
    for path in kept_back:
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        (run / path).write_bytes(SECRET)
    assert service.get(f"/jobs/{job}/files").json() == before
    for path in kept_back:
        status, _, body = exchange(service, "GET", f"/jobs/{job}/files/{quote(path)}")
        assert (status, SECRET in body) == (404, False), path
    for folder in ("model", "checkpoints", "attempts"):
        assert SECRET not in service.get(f"/jobs/{job}/files/{folder}").content
    for folder in ("sinks", "tmp-x", "checkpoints/tmp-step-00000001"):
        assert service.get(f"/jobs/{job}/files/{folder}").status_code == 404


def test_offline_runs_of_wandb_can_be_had_to_sync_them_elsewhere(service: Service, job: str) -> None:
    place = service.run(job).path / "wandb" / "offline-run-20261123_213703-job-1-25e585c8"
    (place / "files" / "media").mkdir(parents=True)
    (place / "run-job-1-25e585c8.wandb").write_bytes(b"rows")
    (place / "files" / "media" / "samples.table.json").write_bytes(b"{}")
    (place.parent / "latest-run").symlink_to(place.name)
    listed = {file["path"] for file in service.get(f"/jobs/{job}/files").json()["data"]}
    runs = {path for path in listed if path.startswith("wandb/")}
    assert runs == {
        f"wandb/{place.name}/run-job-1-25e585c8.wandb",
        f"wandb/{place.name}/files/media/samples.table.json",
    }
    for path in runs:
        assert service.get(f"/jobs/{job}/files/{path}").content == (service.run(job).path / path).read_bytes()


def test_of_an_unknown_job_there_is_nothing(service: Service) -> None:
    for path in ("files", "files/model", "checkpoints"):
        assert service.get(f"/jobs/job-nobody/{path}").status_code == 404


# -- nothing that lies elsewhere --------------------------------------------------------------------------------------

UPS = ["..", "%2e%2e", ".%2e", "%2E.", "..%00", "%252e%252e", "..;", "..%20", "%c0%ae%c0%ae", "%ff%ff", "....", "．．"]
SLASHES = ["/", "%2f", "%2F", "\\", "%5c", "//", "/./", "%252f"]


def test_no_spelling_of_a_path_leads_out(service: Service, job: str) -> None:
    outside = service.settings.runs.parent / "secret.txt"
    outside.write_bytes(SECRET)
    other = service.submit()
    (service.run(other).path / "secret.txt").write_bytes(SECRET)
    tries = 0
    for up, slash, start, depth in itertools.product(UPS, SLASHES, ("", "model", "sinks"), (1, 2, 3)):
        for target in ("secret.txt", f"{other}{slash}secret.txt", str(outside)[1:], "etc/passwd"):
            path = slash.join([*([start] if start else []), *[up] * depth, target])
            status, _, body = exchange(service, "GET", f"/jobs/{job}/files/{_sendable(path)}")
            assert (status, SECRET in body, b"root:" in body) == (404, False, False), path
            tries += 1
    assert tries == 3456


def _sendable(path: str) -> str:
    """What an address may not hold is escaped; what is escaped already stays so."""
    return "".join(chr(byte) if 0x20 < byte < 0x7F else f"%{byte:02x}" for byte in path.encode())


ODD = [
    "", "/", ".", "./", "%2e", "/etc/passwd", "%2fetc%2fpasswd", "//etc/passwd", "file:///etc/passwd",
    "model//config.json", "model/./config.json", "model%00", "%00", "model/config.json%00.png", "model/config.json/x",
    "spec.json/..", "~", "~root", "$HOME", "%7e", "C:", "C:%5cx", "model%0ax", "spec.json%20", "SPEC.JSON", "a" * 300,
    "x/" * 500, "proc/self/environ",
]  # fmt: skip


def test_odd_paths_are_not_found(service: Service, job: str) -> None:
    for path in ODD:
        status, _, body = exchange(service, "GET", f"/jobs/{job}/files/{path}")
        assert (status, b"root:" in body) == (404, False), path


def test_no_spelling_of_a_job_leads_out(service: Service) -> None:
    (service.settings.runs.parent / "files").mkdir()
    (service.settings.runs.parent / "events.jsonl").write_bytes(SECRET)
    names = ("..", "%2e%2e", ".", "job-x%2f..%2f..", "%2e%2e%2fdata", "job-..", "%00")
    for name, rest in itertools.product(names, ("files", "files/events.jsonl", "checkpoints")):
        status, _, body = exchange(service, "GET", f"/jobs/{name}/{rest}")
        assert (status, SECRET in body) == (404, False), name


def links(run: Path, outside: Path) -> Iterator[tuple[str, Path]]:
    """Links to where nobody may go, and to where everybody may: a link is never followed."""
    (outside / "folder").mkdir(parents=True)
    (outside / "folder" / "config.json").write_bytes(SECRET)
    (outside / "secret.txt").write_bytes(SECRET)
    yield "secret.txt", outside / "secret.txt"
    yield "relative.txt", Path("..") / ".." / outside.name / "secret.txt"
    yield "linked", outside / "folder"
    yield "model/linked", outside / "folder"
    yield "model/secret.txt", outside / "secret.txt"
    yield "inside.json", run / "model" / "config.json"
    yield "up", Path("..")
    yield "root", Path("/")
    yield "loop", Path("loop")
    yield "dangling", run / "nothing"
    yield "environ", Path("/proc/self/environ")
    yield "handle", Path("/proc/self/fd/0")
    yield "checkpoints/step-00000001", outside / "folder"


def test_links_are_neither_listed_nor_followed_nor_packed(service: Service, job: str, tmp_path: Path) -> None:
    run = service.run(job).path
    before = service.get(f"/jobs/{job}/files").json()
    packed = service.get(f"/jobs/{job}/files/model").content
    made = []
    for path, target in links(run, tmp_path / "outside"):
        (run / path).symlink_to(target)
        made.append(path)
    assert service.get(f"/jobs/{job}/files").json() == before
    assert service.get(f"/jobs/{job}/files/model").content == packed
    assert service.get(f"/jobs/{job}/checkpoints").json()["data"] == []
    below = ("", "/config.json", "/secret.txt", "/folder/config.json", "/etc/passwd", f"/{job}/spec.json")
    for path, rest in itertools.product(made, below):
        status, _, body = exchange(service, "GET", f"/jobs/{job}/files/{path}{rest}")
        assert (status, SECRET in body) == (404, False), path + rest


def test_a_link_put_in_a_folders_place_meanwhile_leads_nowhere(service: Service, job: str, tmp_path: Path) -> None:
    folder, aside = service.run(job).path / "model" / "onnx", tmp_path / "aside"
    (folder / "config.json").write_bytes(b"{}")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_bytes(SECRET)
    (tmp_path / "outside" / "secret.txt").write_bytes(SECRET)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            folder.rename(aside)
            folder.symlink_to(tmp_path / "outside")
            folder.unlink()
            aside.rename(folder)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for path in ("/model/onnx/config.json", "/model/onnx/secret.txt", "/model", "/model/onnx", "") * 100:
            try:
                status, _, body = exchange(service, "GET", f"/jobs/{job}/files{path}")
            except http.client.IncompleteRead as error:  # a tar of which something vanished
                status, body = 200, error.partial
            assert status in (200, 404)
            assert SECRET not in body and b"secret.txt" not in body.partition(b"has no file")[0], path
    finally:
        done.set()
        swapping.join(20)


def test_a_run_directory_that_is_a_link_gives_nothing(service: Service, job: str) -> None:
    run = service.run(job).path
    moved = run.rename(run.parent.parent / "elsewhere")
    run.symlink_to(moved)
    for path in ("files", "files/spec.json", "files/model"):
        assert service.get(f"/jobs/{job}/{path}").status_code == 404
    assert service.get(f"/jobs/{job}/checkpoints").json()["data"] == []


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero has no end
    except PermissionError:
        pytest.skip("only root makes devices")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("make", [os.mkfifo, _device, _socket])
def test_pipes_devices_and_sockets_are_no_files(service: Service, job: str, make: Callable[[Path], None]) -> None:
    run = service.run(job).path
    before = service.get(f"/jobs/{job}/files").json()
    packed = service.get(f"/jobs/{job}/files/model").content
    here = Path.cwd()
    for folder in (run, run / "model"):
        os.chdir(folder)  # the path of a socket is short
        try:
            make(Path("odd"))
        finally:
            os.chdir(here)
    for path in ("odd", "model/odd"):
        assert service.get(f"/jobs/{job}/files/{path}").status_code == 404
    assert service.get(f"/jobs/{job}/files").json() == before
    assert service.get(f"/jobs/{job}/files/model").content == packed


# -- ranges -----------------------------------------------------------------------------------------------------------

RANGES = ["0-0", "0-", "5-9", "511-512", "700-1500", "-1", "-1000", "-99999999", "1299999-", "1300002-99999999"]


@pytest.mark.parametrize("path", ["model/model.safetensors", "model"])
def test_ranges_are_slices_of_the_whole(service: Service, job: str, path: str) -> None:
    address = f"/jobs/{job}/files/{path}"
    whole = service.get(address)
    assert (whole.status_code, whole.headers["Accept-Ranges"]) == (200, "bytes")
    size = len(whole.content)
    assert whole.headers["Content-Length"] == str(size)
    random_ones = [sorted(random.Random(seed).choices(range(size), k=2)) for seed in range(40)]
    for wanted in [*RANGES, *(f"{first}-{last}" for first, last in random_ones)]:
        first, last = wanted.split("-")
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        for conditional in ({}, {"If-Range": whole.headers["ETag"]}):
            part = service.get(address, headers={"Range": f"bytes={wanted}", **conditional})
            assert part.status_code == 206
            assert part.content == whole.content[start:stop], wanted
            assert part.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{size}"
            assert part.headers["ETag"] == whole.headers["ETag"]


@pytest.mark.parametrize("path", ["model/model.safetensors", "model"])
def test_ranges_that_cannot_be_had(service: Service, job: str, path: str) -> None:
    address = f"/jobs/{job}/files/{path}"
    whole = service.get(address)
    size = len(whole.content)
    for beyond in (f"bytes={size}-", f"bytes={size}-{size + 5}", "bytes=999999999999-", "bytes=-0"):
        refused = service.get(address, headers={"Range": beyond})
        assert (refused.status_code, refused.headers["Content-Range"]) == (416, f"bytes */{size}")
        assert refused.json()["error"]["code"] == "range_not_satisfiable"
    ignored = [
        "bytes=5-3",
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "lines=1-2",
        "bytes=0-1,5-6",
        "bytes=٣-",
        "bytes 0-1",
        "9" * 99,
    ]
    for odd in ignored:
        assert service.get(address, headers={"Range": odd.encode()}).content == whole.content, odd
    another = {"Range": "bytes=5-", "If-Range": '"another"'}
    assert service.get(address, headers=another).content == whole.content


@pytest.mark.parametrize("path", ["model/model.safetensors", "model", "model/", "model/onnx/empty.txt"])
def test_head_says_what_get_would(service: Service, job: str, path: str) -> None:
    address = f"/jobs/{job}/files/{path}"
    got, asked = service.get(address), service.request("HEAD", address)
    assert (asked.status_code, asked.content) == (200, b"")
    for name in ("Content-Length", "Content-Type", "ETag", "Last-Modified", "Content-Disposition"):
        assert asked.headers[name] == got.headers[name]
    assert service.request("HEAD", f"/jobs/{job}/files/nothing").status_code == 404
    # RFC 9110 has ranges for GET alone.
    again = service.request("HEAD", address, headers={"Range": "bytes=99999999-"})
    assert (again.status_code, again.headers["Content-Length"]) == (200, asked.headers["Content-Length"])


def test_what_a_browser_is_told(service: Service, job: str) -> None:
    kinds = {"model/config.json": "application/json", "events.jsonl": "application/jsonl", "model": "application/x-tar"}
    for path, kind in kinds.items():
        answer = service.get(f"/jobs/{job}/files/{path}")
        assert answer.headers["Content-Type"] == kind
        assert answer.headers["Content-Disposition"].startswith("attachment; filename=")
    assert f'"{job}-model.tar"' in service.get(f"/jobs/{job}/files/model").headers["Content-Disposition"]


# -- tars -------------------------------------------------------------------------------------------------------------


def test_a_folder_is_a_tar_of_its_files(service: Service, job: str) -> None:
    folder = service.run(job).path / "model"
    first, second = (service.get(f"/jobs/{job}/files/model") for _ in range(2))
    assert unpacked(first.content) == content(folder)
    assert (first.content, first.headers["ETag"]) == (second.content, second.headers["ETag"])
    assert unpacked(service.get(f"/jobs/{job}/files/model/onnx").content) == {"onnx/empty.txt": b""}
    assert unpacked(service.get(f"/jobs/{job}/files/checkpoints").content) == {}
    replacement = folder / "new"
    replacement.write_bytes((folder / "config.json").read_bytes())
    status = (folder / "config.json").stat()
    os.utime(replacement, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(replacement, folder / "config.json")
    assert service.get(f"/jobs/{job}/files/model").headers["ETag"] != first.headers["ETag"]


def test_a_tar_of_more_than_eight_gigabytes_and_long_names(service: Service, job: str) -> None:
    folder = service.run(job).path / "oom_reports" / ("long-" * 30 + "folder")
    folder.mkdir(parents=True)
    size = 9 << 30
    with open(folder / "big.bin", "wb") as file:
        file.truncate(size)
        file.seek(size - 4)
        file.write(b"last")
    (folder / "z.txt").write_bytes(b"behind")
    address = f"/jobs/{job}/files/oom_reports"
    total = int(service.request("HEAD", address).headers["Content-Length"])
    beginning = service.get(address, headers={"Range": "bytes=0-8191"}).content
    end = service.get(address, headers={"Range": f"bytes={total - 8192}-"}).content
    assert b"last" in end
    with tarfile.open(fileobj=io.BytesIO(beginning), mode="r:") as archive:
        first = archive.next()
        assert first is not None
        assert (first.name, first.size) == (f"oom_reports/{folder.name}/big.bin", size)
        start = first.offset_data
    rest = service.get(address, headers={"Range": f"bytes={start + size}-"}).content
    assert unpacked(rest) == {f"oom_reports/{folder.name}/z.txt": b"behind"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl_goes_on_with_a_folder_that_broke_off(service: Service, job: str, tmp_path: Path) -> None:
    address = f"{service.url}/jobs/{job}/files/model"
    whole = service.get(f"/jobs/{job}/files/model").content
    target = tmp_path / "model.tar"
    target.write_bytes(whole[: len(whole) // 3])
    subprocess.run(["curl", "-sS", "-C", "-", "-o", str(target), address], check=True)
    assert target.read_bytes() == whole


@pytest.mark.parametrize("become", ["replaced", "shorter", "gone"])
def test_a_tar_of_which_something_changed_ends_early(service: Service, job: str, become: str) -> None:
    folder = service.run(job).path / "checkpoints" / "step-00000001"
    folder.mkdir()
    for name in ("a.bin", "b.bin"):
        with open(folder / name, "wb") as file:
            file.truncate(64 << 20)  # far more than is on its way in sockets
    with closing(http.client.HTTPConnection("127.0.0.1", service.settings.port, timeout=30)) as connection:
        connection.request("GET", f"/jobs/{job}/files/checkpoints/step-00000001")
        answer = connection.getresponse()
        answer.read(1000)
        if become == "gone":
            shutil.rmtree(folder)
        elif become == "shorter":
            os.truncate(folder / "b.bin", 100)
        else:
            shutil.copy(folder / "b.bin", folder / "c.bin")
            os.replace(folder / "c.bin", folder / "b.bin")
        with pytest.raises(http.client.IncompleteRead):
            answer.read()


def test_a_file_that_is_removed_while_it_is_sent_comes_whole(service: Service, job: str) -> None:
    file = service.run(job).path / "big.bin"
    with open(file, "wb") as made:
        made.truncate(64 << 20)
    with closing(http.client.HTTPConnection("127.0.0.1", service.settings.port, timeout=30)) as connection:
        connection.request("GET", f"/jobs/{job}/files/big.bin")
        answer = connection.getresponse()
        answer.read(1000)
        file.unlink()
        assert len(answer.read()) == (64 << 20) - 1000


def test_a_file_that_grows_is_sent_as_long_as_it_was(service: Service, job: str) -> None:
    file = service.run(job).path / "metrics.jsonl"
    with open(file, "wb") as made:
        made.truncate(64 << 20)
    with closing(http.client.HTTPConnection("127.0.0.1", service.settings.port, timeout=30)) as connection:
        connection.request("GET", f"/jobs/{job}/files/metrics.jsonl")
        answer = connection.getresponse()
        with open(file, "ab") as made:
            made.write(b"more")
        assert answer.read() == bytes(64 << 20)


# -- slow clients, large files ----------------------------------------------------------------------------------------


def test_who_reads_slowly_keeps_nobody_waiting_and_no_file_stays_open(service: Service, job: str) -> None:
    run = service.run(job).path
    with open(run / "model" / "model.safetensors", "r+b") as made:
        made.truncate(64 << 20)
    with ExitStack() as slow:
        for number in range(60):  # the pool has 40 threads
            path = "model" if number % 2 else "model/model.safetensors"
            connection = slow.enter_context(begin(service, f"GET /jobs/{job}/files/{path} HTTP/1.1\nHost: localhost"))
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert opened(run) >= 60
        assert service.get(f"/jobs/{job}").status_code == 200
    until(lambda: opened(run) == 0)


def test_who_does_not_take_what_he_asked_for_is_let_go(
    service: Service, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "TAKEN_WITHIN_S", 1.0)
    run = service.run(job).path
    with open(run / "model" / "model.safetensors", "r+b") as made:
        made.truncate(64 << 20)
    head = f"GET /jobs/{job}/files/model/model.safetensors HTTP/1.1\nHost: localhost"
    with begin(service, head) as asleep, begin(service, head) as awake:
        assert awake.recv(12) == asleep.recv(12) == b"HTTP/1.1 200"
        assert opened(run) == 2
        taken = 0
        while taken < 64 << 20:  # while the other sleeps
            taken += len(awake.recv(1 << 20))
        until(lambda: opened(run) == 0)
        late = 0
        while block := asleep.recv(1 << 20):  # what was on its way
            late += len(block)
        assert late < 64 << 20


def opened(run: Path) -> int:
    """Files and folders of a run directory that this process, in which the service runs, holds open."""
    count = 0
    for handle in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{handle}").startswith(str(run))
        except FileNotFoundError:
            continue
    return count


def test_memory_stays_flat_while_a_large_file_goes(tmp_path: Path) -> None:
    with Stack(tmp_path / "stack", data=tmp_path) as stack:
        stack.start("service")
        run = stack.submit(tiny_job())
        run.model.mkdir()
        with open(run.model / "model.safetensors", "wb") as file:
            file.truncate(1 << 28)
        before = highest_memory(stack)
        for path in ("model/model.safetensors", "model"):
            with closing(http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)) as connection:
                connection.request("GET", f"/jobs/{run.id}/files/{path}")
                answer = connection.getresponse()
                expected, seen = int(answer.headers["Content-Length"]), 0
                while block := answer.read(1 << 20):
                    seen += len(block)
                assert seen == expected >= 1 << 28
        assert highest_memory(stack) - before < 48 << 20
