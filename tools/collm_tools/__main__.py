"""`python -m collm_tools` is the `collm` command."""

from __future__ import annotations

import sys

from collm_tools.cli import main

sys.exit(main())
