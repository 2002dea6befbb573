"""Starts `collm load`; every option is passed on."""

from __future__ import annotations

import sys

from collm_tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["load", *sys.argv[1:]]))
