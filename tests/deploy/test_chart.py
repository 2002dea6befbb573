"""What the Helm chart makes of its profiles: valid for Kubernetes, and true about the services."""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import msgspec
import pytest
import referencing
import yaml

from collm_common.sentinel import Watched
from collm_common.settings import Common, load
from collm_coordinator.settings import CoordinatorSettings
from collm_dispatcher.settings import DispatcherSettings
from collm_launcher.settings import LauncherSettings
from collm_replica.settings import ReplicaSettings
from scripts import chart_schema
from tests.deploy.chart import (
    CHART,
    COMBINATIONS,
    HELM,
    ROOT,
    Object,
    containers,
    environment,
    helm,
    pods,
    render,
    values,
)

SETTINGS: dict[str, type[Common]] = {
    "dispatcher": DispatcherSettings,
    "dispatch-loop": DispatcherSettings,
    "replica": ReplicaSettings,
    "launcher": LauncherSettings,
    "coordinator": CoordinatorSettings,
}
EXTENSIONS = "monitoring.coreos.com/v1"
KUBERNETES = ("1.25.0", "1.37.0")
NAMES = [" + ".join(profiles) or "defaults" for profiles in COMBINATIONS]

pytestmark = pytest.mark.skipif(HELM is None, reason="no helm here")
each_profile = pytest.mark.parametrize("profiles", COMBINATIONS, ids=NAMES)


def in_defaults(component: str) -> Object:
    """The first container of a component."""
    return next(found for name, found in containers(render()) if name == component and found["name"] != "model")


@cache
def validator(version: str, kind: str, api: str) -> Any:
    """The strict schema of one kind: an unknown field is an error."""
    folder = resources.files("kubernetes_validate") / f"kubernetes-json-schema/v{version}-local-strict"
    group, _, number = api.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], number) if part)
    schema = json.loads((folder / f"{name}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=definitions(version))


@cache
def definitions(version: str) -> Any:
    """What all schemas of a version refer to."""
    folder = resources.files("kubernetes_validate") / f"kubernetes-json-schema/v{version}-local-strict"
    common = referencing.Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    return common @ referencing.Registry()


@each_profile
def test_helm_finds_nothing_to_say(profiles: tuple[str, ...]) -> None:
    """A chart that helm refuses or warns of."""
    done = helm("lint", "--strict", str(CHART), *values(profiles))
    assert done.returncode == 0, done.stdout


def test_a_packaged_chart_is_whole(tmp_path: Path) -> None:
    """A package without the files that are links here: a broker without users, or a list of alerts that is empty."""
    options = ("--set=redis.passwordSecret=own,monitoring.rules.enabled=true,monitoring.dashboard.enabled=true",)
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.iterdir()
    packaged = helm("template", "demo", str(package), *options)
    assert tuple(found for found in yaml.safe_load_all(packaged.stdout) if found) == render((), *options)


@each_profile
def test_kubernetes_knows_every_field(profiles: tuple[str, ...]) -> None:
    """An object that the oldest or the newest Kubernetes refuses, or a field that it silently drops."""
    wrong = []
    for found in render(profiles):
        if found["apiVersion"] == EXTENSIONS:
            continue
        for version in KUBERNETES:
            errors = validator(version, found["kind"], found["apiVersion"]).iter_errors(found)
            what = f"{version} {found['kind']} {found['metadata']['name']}"
            wrong += [f"{what} {error.json_path}: {error.message[:200]}" for error in errors]
    assert wrong == []


@each_profile
def test_each_service_takes_its_environment(profiles: tuple[str, ...]) -> None:
    """A pod that ends at once, because of a name that is no setting or a value that is none."""
    for component, container in containers(render(profiles)):
        if component in SETTINGS and container["name"] != "model":
            load(SETTINGS[component], component.replace("dispatch-loop", "dispatcher"), environment(container))


@each_profile
def test_no_pod_may_more_than_it_needs(profiles: tuple[str, ...]) -> None:
    """A pod that a namespace of the level `restricted` refuses; or service links, whose variables services refuse."""
    for component, pod in pods(render(profiles)):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False, component
        assert spec["automountServiceAccountToken"] is False, component
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {next(iter(volume.keys() - {"name"})) for volume in spec.get("volumes", ())} <= {
            "emptyDir",
            "configMap",
            "persistentVolumeClaim",
            "secret",
        }
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@each_profile
def test_every_port_that_is_named_is_there(profiles: tuple[str, ...]) -> None:
    """A service, a probe, a policy or a monitor that speaks to a port which nobody opens."""
    objects = render(profiles)
    opened = {
        component: {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        for component, container in containers(objects)
    }
    services = {}
    for found in objects:
        spec, what = found.get("spec", {}), f"{found['kind']} {found['metadata']['name']}"
        match found["kind"]:
            case "Service":
                component = spec["selector"]["app.kubernetes.io/component"]
                services[found["metadata"]["name"]] = {port["name"]: port["port"] for port in spec["ports"]}
                assert {port["targetPort"] for port in spec["ports"]} <= opened[component].keys(), what
            case "NetworkPolicy":
                component = spec["podSelector"]["matchLabels"].get("app.kubernetes.io/component", "")
                ports = {port["port"] for rule in spec.get("ingress", ()) for port in rule["ports"]}
                assert ports <= opened.get(component, {}).keys(), what
    for component, container in containers(objects):
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if port := container.get(probe, {}).get("httpGet", {}).get("port"):
                assert port in opened[component]
        own = environment(container)
        if (url := own.get("COLLM_REDIS_URL")) and "example" not in url:
            assert re.fullmatch(r"redis://\w+:secret@demo-collm-redis:6379/0", url)
            assert services["demo-collm-redis"] == {"redis": 6379}
        if "COLLM_REPLICA_PORT" in own:
            assert opened["replica"] == {"data": int(own["COLLM_REPLICA_PORT"])}
            assert own["COLLM_REPLICA_ADVERTISE_HOST"].endswith(".demo-collm-replica")
        if "COLLM_DISPATCHER_PORT" in own:
            assert opened["dispatcher"] == {"http": int(own["COLLM_DISPATCHER_PORT"])}


@each_profile
def test_only_the_ingress_can_be_reached_from_outside(profiles: tuple[str, ...]) -> None:
    """A broker, or a replica's private data, that any pod of the cluster may speak to."""
    policies = [found["spec"] for found in render(profiles) if found["kind"] == "NetworkPolicy"]
    closed = [spec for spec in policies if "ingress" not in spec]
    everything = {"app.kubernetes.io/name": "collm", "app.kubernetes.io/instance": "demo"}
    assert [spec["podSelector"]["matchLabels"] for spec in closed] == [everything]
    for _, pod in pods(render(profiles)):
        assert everything.items() <= pod["metadata"]["labels"].items()
    for spec in policies:
        component = spec["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
        for rule in spec.get("ingress", ()):
            inside = [
                everything.items() <= peer.get("podSelector", {}).get("matchLabels", {}).items()
                for peer in rule.get("from", ())
            ]
            assert component in ("dispatcher", "coordinator") or (inside and all(inside))


@each_profile
def test_there_is_time_to_drain_and_to_load(profiles: tuple[str, ...]) -> None:
    """Answers cut off in their middle, or an engine that is killed while it loads its model or while it is healed."""
    for component, pod in pods(render(profiles)):
        container = pod["spec"]["containers"][0]
        if component not in ("dispatcher", "dispatch-loop", "replica"):
            continue
        service = "replica" if component == "replica" else "dispatcher"
        settings: Any = load(SETTINGS[component], service, environment(container))
        before_s = float(
            container.get("lifecycle", {"preStop": {"exec": {"command": ["", "0"]}}})["preStop"]["exec"]["command"][1]
        )
        assert pod["spec"]["terminationGracePeriodSeconds"] >= before_s + settings.drain_s + 10
        if component == "replica":
            start, alive = (
                container[probe]["periodSeconds"] * container[probe]["failureThreshold"]
                for probe in ("startupProbe", "livenessProbe")
            )
            assert start >= settings.start_timeout_s
            assert alive >= settings.stall_s + settings.start_timeout_s


def test_the_drains_that_the_chart_assumes_are_those_of_the_services() -> None:
    """A default that was changed in a service and not where the chart adds up its times."""
    said = {
        (path.name, name): float(default)
        for path in (CHART / "templates").iterdir()
        if path.is_file()
        for name, default in re.findall(r'get \$values\.settings "(\w+_s)" \| default (\d+)', path.read_text())
    }
    known = {
        (file, field.name): field.default
        for file, cls in (("_dispatcher.tpl", DispatcherSettings), ("replica.yaml", ReplicaSettings))
        for field in msgspec.structs.fields(cls)
    }
    assert len(said) == 4
    assert said == {key: known[key] for key in said}


def test_images_are_those_that_compose_builds() -> None:
    """An image that nobody has built."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    built = {service["image"] for name, service in compose.items() if name not in ("load", "prometheus", "grafana")}
    built = {re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", image) for image in built}
    used = {container["image"].removesuffix(":latest") for _, container in containers(render())}
    assert used == built


def test_the_broker_has_the_users_that_services_are() -> None:
    """A service that the broker turns away; or a list of users that was copied and then changed in one place."""
    objects = render()
    config = next(found["data"] for found in objects if found["kind"] == "ConfigMap")
    for name in ("users.acl", "start.sh", "redis.conf"):
        assert (ROOT / "deploy/redis" / name).read_text() in f"{config[name]}\n"
    users = set(re.findall(r"^user (\w+) ", config["users.acl"], flags=re.MULTILINE)) - {"default"}
    passwords = next(found["data"] for found in objects if found["kind"] == "Secret")
    assert passwords.keys() == users
    assert len({base64.b64decode(word) for word in passwords.values()}) == len(users)
    assert {name.lower() for name in environment(in_defaults("redis"))} == {f"{user}_password" for user in users}
    for component in SETTINGS.keys() - {"dispatch-loop"}:
        container = in_defaults(component)
        secret = next(
            entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if entry["name"] == "REDIS_PASSWORD"
        )
        assert secret == {"name": "demo-collm-redis", "key": component}
        assert environment(container)["COLLM_REDIS_URL"].startswith(f"redis://{component}:")


def test_an_external_broker_is_met_as_it_is_described() -> None:
    """A password that travels in the clear, or a broker beside the one that was named."""
    objects = render(("external-redis",))
    assert [component for component, _ in pods(objects) if component == "redis"] == []
    urls = {component: environment(found).get("COLLM_REDIS_URL") for component, found in containers(objects)}
    assert urls["launcher"] == "rediss://launcher:secret@redis.example.com:6380/0"


def test_the_authority_that_signs_a_brokers_certificate_is_there() -> None:
    """A path in a URL behind which no volume lies, in one of five pods."""
    objects = render(("external-redis",), "--set=redis.external.caSecret=ca,dispatchLoop.replicas=1")
    checked = 0
    for component, pod in pods(objects):
        container = pod["spec"]["containers"][0]
        if "COLLM_REDIS_URL" in (own := environment(container)):
            path = parse_qs(urlsplit(own["COLLM_REDIS_URL"]).query)["ssl_ca_certs"][0]
            mount = next(each for each in container["volumeMounts"] if path.startswith(f"{each['mountPath']}/"))
            volume = next(each for each in pod["spec"]["volumes"] if each["name"] == mount["name"])
            assert volume["secret"] == {"secretName": "ca"}, component
            checked += 1
    assert checked == len(SETTINGS)


def test_sentinels_are_asked_in_place_of_a_host() -> None:
    """A URL that the services read otherwise than it was meant, or a password for the wrong one."""
    watched = ("host=", "tls=false", "sentinel.name=cell", "sentinel.login=true", "sentinel.nodes={one:1,two:2}")
    objects = render(("external-redis",), *(f"--set=redis.external.{option}" for option in watched))
    url = next(
        environment(found)["COLLM_REDIS_URL"] for component, found in containers(objects) if component == "launcher"
    )
    assert Watched.of(url) == Watched(
        sentinels=(("one", 1), ("two", 2)),
        name="cell",
        primary={"username": "launcher", "password": "secret", "db": 0},
        sentinel={"password": "secret"},
    )


def test_a_claim_is_filled_once_and_then_only_read() -> None:
    """Pods that convert one model into one folder at the same time."""
    objects = render(("gpu", "production"))
    filling = [component for component, found in containers(objects) if found["image"].startswith("collm-model")]
    assert filling == ["model"]
    for component, pod in pods(objects):
        for volume in pod["spec"].get("volumes", ()):
            if volume["name"] == "models":
                assert volume["persistentVolumeClaim"].get("readOnly", False) is (component != "model")


def test_the_schema_allows_what_the_settings_classes_allow() -> None:
    """A setting that the chart refuses, or one that it takes and no service knows."""
    schema = json.loads(chart_schema.FILE.read_text())
    assert chart_schema.with_settings(schema) == schema, "run: python -m scripts.chart_schema"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("nonsense=1", "Additional property nonsense is not allowed"),
        ("dispatcher.settings.max_token=5", "dispatcher.settings: Additional property max_token is not allowed"),
        ("dispatcher.settings.max_tokens=0", "dispatcher.settings.max_tokens: Must be greater than or equal to 1"),
        ("launcher.settings.rules.rounds=0", "launcher.settings.rules.rounds: Must be greater than or equal to 1"),
        ("replica.settings.device=cuda", "replica.settings: Additional property device is not allowed"),
        ("replica.data.size=5 apples", "replica.data.size: Does not match pattern"),
        ("model.servedName=a b", "model.servedName: Does not match pattern"),
        ("redis.enabled=false", "redis.external.host: String length must be greater than or equal to 1"),
        (
            "redis.enabled=false,redis.external.sentinel.nodes={a:1}",
            "redis.external.sentinel.name: String length must be",
        ),
        ("redis.enabled=false,redis.external.sentinel.nodes={a:1},redis.external.tls=true", "redis.external.tls"),
        ("redis.enabled=false,redis.external.host=a,redis.external.caSecret=b", "redis.external.caSecret"),
        ("redis.external.cluster=true", "redis.external: Additional property cluster is not allowed"),
        (
            "dispatcher.ingress.enabled=true",
            "dispatcher.ingress.host: String length must be greater than or equal to 1",
        ),
        ("launcher.extraEnv[0].name=COLLM_LAUNCHER_SEED", "COLLM_LAUNCHER_SEED is a setting of CoLLM"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(option: str, said: str) -> None:
    """A value that is misspelt and therefore does nothing."""
    done = helm("template", "demo", str(CHART), "--set", option)
    assert done.returncode != 0
    assert said in done.stderr


def test_numbers_stay_numbers() -> None:
    """A million that helm writes as 1e+06, which no service takes for a whole number."""
    objects = render((), "--set", "dispatcher.settings.max_queued=1000000")
    own = environment(next(found for name, found in containers(objects) if found["name"] == "dispatcher"))
    assert load(DispatcherSettings, "dispatcher", own).max_queued == 1_000_000
