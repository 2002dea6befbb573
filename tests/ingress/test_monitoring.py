"""What Prometheus and Grafana are given, against what the ingress really says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from collm_common.keys import Keys
from collm_dispatcher.settings import DispatcherSettings
from tests.ingress.support import chat, front

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
ENDS = {"histogram": ("_bucket", "_sum", "_count")}
METRIC = re.compile(r"collm:\w+")
USE = re.compile(r"(?:by \((?P<by>[\w, ]+)\) \((?:rate|increase)?\(?)?(?P<name>collm:\w+)(?:\{(?P<labels>[^}]*)\})?")


def expressions() -> list[str]:
    """Every query of the dashboards and every condition of an alert."""
    found = []
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        found += [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
        found += [variable["definition"] for variable in board["templating"]["list"]]
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
    return found + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


async def said(redis: Redis, keys: Keys, folder: Path) -> dict[str, set[str]]:
    """Names of samples and metrics on the page of an ingress that has served, each with its labels."""
    async with front(redis, keys, folder, replicas=2) as running:
        await redis.hset(keys.adapter("desk"), mapping={"model": "m", "version": "0"})
        await redis.sadd(keys.adapters, "desk")
        assert (await running.post("/v1/chat/completions", chat()))[0] == 200
        assert (await running.post("/v1/chat/completions", {"model": "m"}))[0] == 400
        async with running.http.get("/metrics") as response:
            text = await response.text()
    types = re.findall(r"^# TYPE (\S+) (\w+)", text, flags=re.MULTILINE)
    found: dict[str, set[str]] = {name + end: set() for name, type_ in types for end in ENDS.get(type_, ("",))}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_every_metric_that_is_drawn_or_watched_exists(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A panel that stays empty, or an alert that never fires, since a metric or a label was renamed."""
    known = await said(redis, keys, tokenizer_folder)
    unknown = {name for text in expressions() for name in METRIC.findall(text)} - known.keys()
    assert unknown == set()
    for text in expressions():
        for use in USE.finditer(text):
            labels = set(re.findall(r"(\w+)\s*[=!]~?", use["labels"] or ""))
            labels |= set(re.findall(r"\w+", use["by"] or ""))
            assert not known[use["name"]] or labels <= known[use["name"]], text


def test_panels_lie_side_by_side() -> None:
    """Panels over each other, two of one id, or queries without a source."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        panels = board["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            at = panel["gridPos"]
            cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not cells & taken, panel["title"]
            taken |= cells


def test_what_compose_mounts_is_there() -> None:
    """A container that starts on an empty folder, or scrapes a port where nobody listens."""
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())
    for name in ("prometheus", "grafana"):
        service = compose["services"][name]
        assert service["profiles"] == ["monitoring"]
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY.parent / source).is_dir()
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).name in {path.name for path in DASHBOARDS}
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    used = {panel["datasource"]["uid"] for board in boards for panel in board["panels"] if "datasource" in panel}
    assert used == {source["uid"] for source in sources}
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["dns_sd_configs"][0]["port"] == DispatcherSettings().port
    assert set(scraped["dns_sd_configs"][0]["names"]) <= compose["services"].keys()
