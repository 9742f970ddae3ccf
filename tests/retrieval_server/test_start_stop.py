"""Start and end of the server process: exit codes, messages, signals, parents."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from retrieval_server.errors import StartupError
from retrieval_server.launch import start_sidecar

RunServer = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]


def assert_one_line(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2 and one line that says why, besides the line that says where it listens."""
    assert ended.returncode == 2, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if " listening on " not in line]
    assert len(lines) == 1, ended.stderr
    for word in words:
        assert word in lines[0]
    assert ended.stdout == ""


def test_port_taken(run_server: RunServer, corpus: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_one_line(run_server("--corpus", corpus, "--port", port), f"127.0.0.1:{port}", "in use")


def test_bad_arguments(run_server: RunServer, corpus: Path) -> None:
    assert_one_line(run_server(), "--corpus")
    assert_one_line(run_server("--corpus", corpus, "--topk", 0), "--topk", "at least 1")
    assert_one_line(run_server("--corpus", corpus, "--port", 70000), "--port", "70000")
    assert_one_line(run_server("--corpus", corpus, "--retriever", "e6"), "--retriever", "e6")
    assert_one_line(run_server("--corpus", corpus, "--bm25-k1", "nan"), "--bm25-k1", "nan")
    assert_one_line(run_server("--corpus", corpus, "--host", "no.such.host.invalid"), "no.such.host.invalid")
    assert_one_line(run_server("--corpus", corpus, "--fd", 99), "--fd 99")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["the file is empty"]),
        ("\n\n", ["only blank lines"]),
        ('{"id": "1", "contents": "x"}\nnot json\n', [":2:", "not valid JSON"]),
        ('{"id": "1", "contents": "x"}\n{"id": "1", "contents": "y"}\n', [":2:", "'1'", "line 1"]),
        ('{"id": "1", "question": "x"}\n', [":1:", "'contents' is missing"]),
    ],
)
def test_bad_corpus(run_server: RunServer, tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(text)
    assert_one_line(run_server("--corpus", path, "--port", 0), str(path), *words)


def test_missing_corpus(run_server: RunServer, tmp_path: Path) -> None:
    assert_one_line(run_server("--corpus", tmp_path / "none.jsonl", "--port", 0), "none.jsonl", "no such file")


def test_search_r1_flags_are_known(run_server: RunServer, tmp_path: Path) -> None:
    ended = run_server("--corpus_path", tmp_path / "none.jsonl", "--retriever_name", "bm25", "--topk", 3)
    assert_one_line(ended, "none.jsonl", "no such file")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_while_a_client_stays_connected(corpus: Path, tmp_path: Path, number: int) -> None:
    sidecar = start_sidecar(corpus, log=tmp_path / "log")
    with httpx.Client(trust_env=False) as http:  # keeps its connection open
        assert http.get(f"{sidecar.url}/livez").status_code == 200
        started = time.monotonic()
        sidecar.process.send_signal(number)
        assert sidecar.process.wait(10) == 0
        assert time.monotonic() - started < 4
    assert "Traceback" not in (tmp_path / "log").read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{sidecar.url}/livez", trust_env=False)
    assert sidecar.stop() == 0


def test_a_signal_ends_it_while_it_loads(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        for number in range(400_000):
            file.write(json.dumps({"id": str(number), "contents": f"passage {number} of many words " * 5}) + "\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "retrieval_server", "--corpus", str(path), "--port", "0"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = line.split("listening on ")[1].split(",")[0]
        with httpx.Client(trust_env=False, timeout=10) as http:
            for _ in range(100):
                answer = http.get(f"{url}/readyz")
                if answer.json()["error"]["details"][0]["progress"] > 0:
                    break
                time.sleep(0.02)
            assert answer.status_code == 503
            assert answer.json()["error"]["details"][0]["phase"] == "reading"
            assert http.post(f"{url}/retrieve", json={"queries": ["x"]}).status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_launch_takes_the_given_port_and_says_when_it_is_taken(corpus: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with start_sidecar(corpus, port=port, topk=2) as sidecar:
        assert sidecar.url == f"http://127.0.0.1:{port}"
        answer = httpx.post(f"{sidecar.url}/retrieve", json={"queries": ["city"]}, trust_env=False)
        assert len(answer.json()["result"][0]) == 2
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}"):
            start_sidecar(corpus, port=port)
    with start_sidecar(corpus, port=port):  # free again
        pass
    assert not sidecar.log.exists()


def test_launch_tells_the_servers_own_reason(tmp_path: Path) -> None:
    bad = tmp_path / "corpus.jsonl"
    bad.write_text("{}\n")
    with pytest.raises(StartupError, match=r"exit code 2: .*corpus\.jsonl:1: field 'id' is missing"):
        start_sidecar(bad, log=tmp_path / "log")


def test_launch_has_a_deadline(corpus: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(StartupError, match=r"not ready after 0\.01 s"):
        start_sidecar(corpus, deadline=0.01, log=tmp_path / "log")
    assert time.monotonic() - started < 15


PARENT = """
    import os, sys, threading, time
    from retrieval_server.launch import start_sidecar
    started = []
    thread = threading.Thread(target=lambda: started.append(start_sidecar(sys.argv[1])))
    thread.start(); thread.join()   # the thread that started the child ends; the child must not
    time.sleep(0.5)
    sidecar = started[0]
    assert sidecar.process.poll() is None, "ended with its thread"
    print(sidecar.process.pid, flush=True)
    {ending}
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("time.sleep(60)", -signal.SIGKILL),  # killed by the test
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("sys.exit(3)", 3),
        ("raise KeyError", 1),
        ("os._exit(4)", 4),
        ("os.fork() or sys.exit(0); time.sleep(0.3); assert sidecar.process.poll() is None", 0),
    ],
)
def test_the_child_ends_with_its_parent(corpus: Path, tmp_path: Path, ending: str, code: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT).format(ending=ending), str(corpus)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if code == -signal.SIGKILL:
            parent.kill()
        _, errors = parent.communicate(timeout=30)
        assert parent.returncode == code, errors
        for _ in range(100):
            if not _alive(child):
                break
            time.sleep(0.05)
        assert not _alive(child)
    finally:
        parent.kill()
        parent.wait()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    # Where nobody reaps orphans, an ended one stays a zombie.
    return not (state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z")
