"""Runs a command that dies with its parent: `python -m collm_tools.stack.tether PARENT_PID COMMAND...` (Linux).

A stack that is killed outright cannot stop its services; the kernel does, through the parent-death signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for SIGTERM at the parent's death, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent is gone already")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
