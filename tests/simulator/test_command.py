"""`collm simulate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collm_tools.cli import USAGE_ERROR, main

LOAD = ["--rate", "50", "--duration", "5", "--slo-e2e", "2000", "--replicas", "2"]


def test_all_policies_see_the_same_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A comparison in which each policy gets arrivals of its own."""
    file = tmp_path / "figures.json"
    assert main(["simulate", "--policy", "all", "--json", str(file), *LOAD]) == 0
    found = json.loads(file.read_text())
    assert len({row["offered"] for row in found.values()}) == 1
    assert all(row["completed"] + row["refused"] == row["offered"] for row in found.values())
    assert "shepherd" in capsys.readouterr().out


def test_an_unknown_policy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error that ends in a traceback."""
    assert main(["simulate", "--policy", "best", *LOAD]) == USAGE_ERROR
    assert "policy" in capsys.readouterr().err
