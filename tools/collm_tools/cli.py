"""`collm`: parse, run one subcommand, turn a known error into one clear line and exit code 2."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from importlib.metadata import version

from collm_common.errors import CollmError
from collm_tools.commands import adapter, completion, demo, doctor, drain, keys, load, reproduce, simulate, status, up

COMMANDS = (up, demo, doctor, status, drain, adapter, keys, load, simulate, reproduce)
USAGE_ERROR = 2
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="collm", description="Serve a language model and fine-tune it on the same copy of its weights."
    )
    root.add_argument("--version", action="version", version=f"collm {version('collm-tools')}")
    subcommands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subcommands)
    completion.add_parser(subcommands, parser)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 fine, 1 the command ran and its result is bad, 2 it could not run as asked."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except CollmError as error:
        print(f"collm: {error}", file=sys.stderr)
        return USAGE_ERROR
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
