"""The share of the GPU's SMs that this process may use: under MPS, fixed when its CUDA context is made."""

from __future__ import annotations

from collections.abc import Mapping

from collm_common.errors import SettingsError

VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
BACKGROUND = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
"""For a process whose kernels wait while those of others do; without MPS it means nothing."""


def environment(share: float) -> dict[str, str]:
    """What a process is given so that it has this share."""
    return {VARIABLE: f"{100 * share:g}"}


def sm_share(environ: Mapping[str, str]) -> float:
    """In (0, 1]; 1 where nothing limits it. Raises SettingsError for what is no percentage."""
    text = environ.get(VARIABLE, "100")
    try:
        percentage = float(text)
    except ValueError:
        percentage = 0.0
    if not 0 < percentage <= 100:
        raise SettingsError(f"{VARIABLE}: {text!r} is not a percentage in (0, 100]")
    return percentage / 100
