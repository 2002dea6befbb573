"""JSON schemas on their way into the engine: tried where they hold nothing up, then compiled beside the steps."""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from collm_common.errors import InvalidRequest, Unavailable
from collm_replica.engine.guide import PARAM, Guide

LIMIT_S, LIMIT_BYTES = 1, 1 << 30
PATIENCE_S = 20.0
KNOWN = 1024


class Schemas:
    """Compiling a schema can take for ever, whatever its length, and nothing can stop it inside of this process.

    So each is compiled first in a process that the system ends after `LIMIT_S` seconds of CPU time. The last `KNOWN`
    verdicts are remembered.
    """

    def __init__(self, compile_: Callable[[str], Guide]) -> None:
        self._compile = compile_
        self._known: OrderedDict[bytes, bool] = OrderedDict()

    async def guide(self, schema: str) -> Guide:
        """For one answer. Raises InvalidRequest, or Unavailable if this machine is too busy to tell."""
        name = blake2b(schema.encode(), digest_size=16).digest()
        if name not in self._known:
            self._known[name] = await _compiles(schema)
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(name)
        if not self._known[name]:
            raise InvalidRequest(
                f"{PARAM}: the schema takes more than {LIMIT_S} s or {LIMIT_BYTES >> 20} MiB to compile", param=PARAM
            )
        return await asyncio.to_thread(self._compile, schema)


async def _compiles(schema: str) -> bool:
    """Whether it comes to an end within the limits; what is wrong with it, the engine says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "collm_replica.schema_trial",
        str(LIMIT_S),
        str(LIMIT_BYTES),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            await process.communicate(schema.encode())
    except TimeoutError as error:
        raise Unavailable(f"{PARAM}: no time to compile the schema", code="busy", retry_after_s=1.0) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode is not None and process.returncode >= 0
