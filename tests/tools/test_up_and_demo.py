"""`collm up` and `collm demo` from start to end, as processes, over quick stand-ins for the services."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from collm_tools.cli import main
from collm_tools.stack.broker import free_port
from tests.support.broker import server_binary
from tests.tools.stand_in import write_packages

SERVER = ("--redis-server", server_binary())


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Services that are quick to start; afterwards, no child process may be left."""
    root = Path(__file__).parents[2]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    paths = [str(write_packages(tmp_path / "packages")), *os.environ.get("PYTHONPATH", "").split(os.pathsep), str(root)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(os.path.abspath(path) for path in paths if path))
    monkeypatch.setenv("STAND_IN_MODEL", tmp_path.name)
    monkeypatch.chdir(tmp_path)
    yield
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def signal_once_ready(port: int, run_dir: Path, number: int) -> threading.Thread:
    """Sends this process a signal as soon as the stack's HTTP service and the last service's log are there."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not (answers(f"http://127.0.0.1:{port}/ready") and (run_dir / "logs" / "coordinator.log").exists()):
            if time.monotonic() > deadline:
                break
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_stops_cleanly_on_a_signal(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int) -> None:
    """Catches services that outlive Ctrl-C, and a traceback in place of a goodbye."""
    port, run_dir = free_port(), tmp_path / "run"
    thread = signal_once_ready(port, run_dir, number)
    assert main(["up", "--model", str(tmp_path), "--port", str(port), "--run-dir", str(run_dir), *SERVER]) == 0
    thread.join()
    assert capsys.readouterr().out.rstrip().endswith("stopped")
    assert len(list((run_dir / "data").iterdir())) == 3


@pytest.mark.usefixtures("stand_ins")
def test_up_welcomes_with_what_to_try(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches `up` that never says it is ready."""
    port = free_port()

    def once_welcomed() -> None:
        deadline = time.monotonic() + 30
        while "redis-cli" not in said() and time.monotonic() < deadline:
            threading.Event().wait(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    seen: list[str] = []

    def said() -> str:
        seen.append(capsys.readouterr().out)
        return "".join(seen)

    thread = threading.Thread(target=once_welcomed)
    thread.start()
    assert main(["up", "--model", str(tmp_path), "--port", str(port), "--served-name", "tiny", *SERVER]) == 0
    thread.join()
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json'" in said()
    assert "3 of 3 replicas ready" in said()


@pytest.mark.usefixtures("stand_ins")
def test_the_demo_writes_report_picture_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a demo that falls over between its parts."""
    out = tmp_path / "out"
    assert main(["demo", "--model", str(tmp_path), "--duration-scale", "0.02", "--out", str(out), *SERVER]) == 0
    found = json.loads((out / "report.json").read_text())
    ask = found["requests"]
    assert ask["offered"] == ask["completed"] > 0
    assert found["base_weights_unchanged"] is True
    assert found["federated"] == {"jobs": 1, "rounds": 2, "clients": 3}
    assert found["adapter_swaps"] == {"snapshots": 9, "published": 6}
    assert found["cross_entropy"]["after"] < found["cross_entropy"]["before"]
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "records.jsonl").read_text().splitlines()) == ask["offered"]
    assert (out / "events.jsonl").stat().st_size > 0
    said = capsys.readouterr().out
    assert "about" in said
    assert "desk@v1 published" in said


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminated_demo_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int) -> None:
    """Catches services left behind by a demo that was stopped, and an old report that passes for its own."""
    port, out = free_port(), tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text("of an earlier demo")

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not answers(f"http://127.0.0.1:{port}/ready") and time.monotonic() < deadline:
            pass
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait)
    thread.start()
    assert main(["demo", "--model", str(tmp_path), "--port", str(port), "--out", str(out), *SERVER]) == 130
    thread.join()
    assert "stopping" in capsys.readouterr().out
    assert not (out / "report.json").exists()
