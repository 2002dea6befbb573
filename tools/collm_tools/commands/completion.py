"""`collm completion`: what a shell needs to complete this command's words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import shtab

from collm_tools.commands.types import Subcommands


def add_parser(subcommands: Subcommands, whole: Callable[[], argparse.ArgumentParser]) -> None:
    """Declare the subcommand; `whole` makes the parser of the whole command line."""
    parser = subcommands.add_parser(
        "completion",
        help="print the completion script of a shell",
        description="Print a script that completes commands and options. bash: source <(collm completion bash); "
        "zsh: collm completion zsh > a folder of $fpath, as _collm.",
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    parser.set_defaults(run=lambda arguments: run(arguments, whole()))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Always 0."""
    sys.stdout.write(shtab.complete(parser, arguments.shell) + "\n")
    return 0
