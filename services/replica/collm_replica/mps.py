"""One replica's own control daemon of NVIDIA's Multi-Process Service: its processes share a GPU at the same time.

Without it, kernels of two processes take turns, and no process can be held to a share of the multiprocessors.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from collm_common.errors import CollmError

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
COMMAND_S = 10.0


class MpsError(CollmError):
    """The daemon cannot be had; the message says why."""


class Mps:
    """`environment` makes a process a client. Pipes and logs lie in `folder`, so that no other daemon is met."""

    def __init__(self, folder: Path, control: str = CONTROL) -> None:
        self._folder, self._control = folder, control

    @property
    def environment(self) -> dict[str, str]:
        """For every process that is to share the GPU, the first one included."""
        return {PIPES: str(self._folder / "pipes"), LOGS: str(self._folder / "logs")}

    def start(self) -> None:
        """Start the daemon and ask it for its servers. Raises MpsError."""
        if shutil.which(self._control) is None:
            raise MpsError(f"{self._control} is not installed")
        for folder in self.environment.values():
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._run("-d")
        self._run(command="get_server_list")

    def stop(self) -> None:
        """End the daemon and its server. Raises MpsError."""
        self._run(command="quit")

    def _run(self, *arguments: str, command: str = "") -> str:
        environment = {**os.environ, **self.environment}
        try:
            result = subprocess.run(
                [self._control, *arguments],
                input=f"{command}\n" if command else "",
                env=environment,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsError(f"{self._control} {' '.join(arguments) or command}: {error}") from error
        if result.returncode:
            said = (result.stderr or result.stdout).strip() or f"exit status {result.returncode}"
            raise MpsError(f"{self._control} {' '.join(arguments) or command}: {said}")
        return result.stdout
