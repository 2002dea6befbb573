"""How a replica's two processes share a GPU: at the same time under MPS, else by turns."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path

from collm_replica.mps import Mps, MpsError

log = logging.getLogger(__name__)


class Sharing:
    """MPS where it is wanted and can be had; whoever cannot start under it goes on without.

    The pipes lie in a short-lived folder of their own: the path of a socket must be short.
    """

    def __init__(self, wanted: bool, control: str = "nvidia-cuda-mps-control") -> None:
        self._wanted, self._control = wanted, control
        self._folder: Path | None = None
        self._mps: Mps | None = None
        self._proven = False

    @property
    def environ(self) -> dict[str, str]:
        """For both processes."""
        return {} if self._mps is None else self._mps.environment

    async def start(self) -> None:
        """Start the daemon, if it is wanted and there."""
        if not self._wanted:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="collm-mps-"))
        mps = Mps(self._folder, self._control)
        try:
            await asyncio.to_thread(mps.start)
        except MpsError as error:
            self._remove()
            log.warning("no MPS: the processes share the GPU by turns, and SM shares mean nothing: %s", error)
            return
        self._mps = mps
        log.info("MPS is up: the processes share the GPU at the same time")

    def proven(self) -> None:
        """A process has worked under it: what kills one later is another matter."""
        self._proven = True

    async def failed(self, why: str) -> None:
        """A process has died; before anything worked under MPS, MPS is given up."""
        if self._mps is not None and not self._proven:
            log.warning("MPS is given up, the processes share the GPU by turns: %s", why)
            await self.stop()

    async def stop(self) -> None:
        """End the daemon."""
        mps, self._mps = self._mps, None
        if mps is None:
            return
        try:
            await asyncio.to_thread(mps.stop)
        except MpsError as error:
            log.warning("the MPS daemon does not end: %s", error)
        self._remove()

    def _remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
