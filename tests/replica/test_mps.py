"""The control daemon of the Multi-Process Service, with a stand-in where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from collm_replica.mps import Mps, MpsError
from collm_replica.sharing import Sharing

CONTROL = """#!/bin/sh
case "$1" in
-d) mkdir -p "$CUDA_MPS_LOG_DIRECTORY" && echo up > "$CUDA_MPS_PIPE_DIRECTORY/daemon"; exit 0 ;;
esac
read -r command
[ -f "$CUDA_MPS_PIPE_DIRECTORY/daemon" ] || { echo "Cannot find MPS control daemon process" >&2; exit 1; }
[ "$command" = quit ] && rm "$CUDA_MPS_PIPE_DIRECTORY/daemon"
exit 0
"""


@pytest.fixture
def control(tmp_path: Path) -> str:
    path = tmp_path / "control"
    path.write_text(CONTROL)
    path.chmod(0o755)
    return str(path)


def test_a_daemon_lives_in_its_own_folder(tmp_path: Path, control: str) -> None:
    """A daemon that meets another replica's, or one that nobody ends."""
    mps = Mps(tmp_path / "mps", control)
    mps.start()
    assert (tmp_path / "mps" / "pipes" / "daemon").exists()
    assert (tmp_path / "mps" / "pipes").stat().st_mode & 0o777 == 0o700
    assert all(str(tmp_path) in folder for folder in mps.environment.values())
    mps.stop()
    assert not (tmp_path / "mps" / "pipes" / "daemon").exists()
    with pytest.raises(MpsError, match="Cannot find MPS control daemon"):
        mps.stop()


def test_a_missing_daemon_is_told_apart(tmp_path: Path) -> None:
    """A replica that does not start, or says nothing, where MPS is not installed."""
    with pytest.raises(MpsError, match="no-such-control is not installed"):
        Mps(tmp_path, "no-such-control").start()


def stand_in(control: str) -> Sharing:
    return Sharing(wanted=True, control=control)


async def test_processes_are_clients_until_the_end(control: str) -> None:
    """A process outside of MPS, a daemon that outlives its replica, and folders that pile up."""
    sharing = stand_in(control)
    await sharing.start()
    pipes = Path(sharing.environ["CUDA_MPS_PIPE_DIRECTORY"])
    assert (pipes / "daemon").exists()
    sharing.proven()
    await sharing.failed("killed")
    assert sharing.environ
    await sharing.stop()
    assert sharing.environ == {}
    assert not pipes.parent.exists()


async def test_without_mps_the_gpu_is_shared_by_turns(control: str, caplog: pytest.LogCaptureFixture) -> None:
    """A replica that does not start for want of a daemon, or keeps one under which nothing starts, or says nothing."""
    missing = stand_in("no-such-control")
    await missing.start()
    assert missing.environ == {}
    assert "share the GPU by turns" in caplog.text
    broken = stand_in(control)
    await broken.start()
    pipes = Path(broken.environ["CUDA_MPS_PIPE_DIRECTORY"])
    await broken.failed("exit status 1 while starting")
    assert broken.environ == {}
    assert not pipes.exists()
