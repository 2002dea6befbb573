"""Programs from PyPI, each in an environment of its own, which `make clients` sets up."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("COLLM_TEST_OUTSIDE", Path(__file__).parents[2] / ".venv/outside"))


def needs(name: str) -> pytest.MarkDecorator:
    """Skips a test where the program is not there."""
    return pytest.mark.skipif(not (FOLDER / name / "bin" / name).exists(), reason=f"{name} is not installed")


async def run(name: str, *arguments: str, folder: Path, within_s: float = 280.0, **environment: str) -> str:
    """What it prints, run in `folder`; an exit status other than 0 fails the test."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_"))}
    process = await asyncio.create_subprocess_exec(
        str(FOLDER / name / "bin" / name),
        *arguments,
        cwd=folder,
        env={**clean, "HOME": str(folder), **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(within_s):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, out.decode(errors="replace")[-8000:]
    return out.decode(errors="replace")
