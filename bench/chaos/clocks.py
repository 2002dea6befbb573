"""A wall clock of its own for each service, that can be stepped while it runs: a small library is preloaded into it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clocks:
    """Files in `folder` hold each service's offset; monotonic clocks are not touched."""

    def __init__(self, folder: Path) -> None:
        """Raises subprocess.CalledProcessError if the library does not compile."""
        self._folder = folder
        folder.mkdir(parents=True)
        self._library = folder / "clock.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", self._library, SOURCE, "-ldl"], check=True)

    @staticmethod
    def possible() -> bool:
        """Whether there is a C compiler."""
        return shutil.which("cc") is not None

    def environment(self, name: str) -> Mapping[str, str]:
        """What a service that is to have the clock `name` must be started with."""
        self.step(name, 0)
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._folder / name)}

    def step(self, name: str, offset_s: int) -> None:
        """From now on its clock is off by this; seen at once."""
        path = self._folder / name
        path.touch()
        with path.open("r+b") as file:
            file.write(offset_s.to_bytes(8, "little", signed=True))
