"""What the documentation names, against what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from collm_tools.cli import parser
from scripts.chart_schema import CLASSES

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
each_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    """A page that was renamed, and is still pointed at."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@each_page
def test_every_variable_is_a_setting(page: Path) -> None:
    """A setting that was renamed: whoever follows the page is refused at the start."""
    known = {f"COLLM_{service}_{name}".upper() for service, cls in CLASSES.items() for name in cls.__struct_fields__}
    services = "|".join(CLASSES).upper()
    named = re.findall(rf"COLLM_(?:{services})_[A-Z][A-Z_]*[A-Z](?![A-Z_…])", page.read_text())
    assert sorted(set(named) - known) == []


@each_page
def test_every_command_exists(page: Path) -> None:
    """A command line that was right once."""
    subcommands = next(action.choices for action in parser()._actions if action.choices)
    said = re.findall(r"(?:^ {4}\S*|`|\()collm ([a-z]+)", page.read_text(), flags=re.MULTILINE)
    assert sorted(set(said) - set(subcommands)) == []


def test_every_alert_says_what_to_do() -> None:
    """Somebody who is woken up by a name that no page knows."""
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    told = re.findall(r"^\| `(Collm\w+)` \|", (ROOT / "docs/operations.md").read_text(), flags=re.MULTILINE)
    assert set(told) == alerts
