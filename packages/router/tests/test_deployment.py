"""Files to run Stemma with: Kubernetes manifests, the Dockerfile, the systemd unit. Nothing is started."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from stemma.cli import load_command
from stemma.config.loading import load_settings, setting_fields

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "examples" / "cluster"
UNIT = ROOT / "examples" / "systemd" / "stemma.service"


def manifests() -> list[dict[str, Any]]:
    return [
        one for path in sorted(CLUSTER.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text("utf-8"))
    ]


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in manifests() if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod(kind: str, name: str) -> dict[str, Any]:
    return manifest(kind, name)["spec"]["template"]["spec"]


PODS = [("StatefulSet", "stemma"), ("Deployment", "stemma-router")]


def parsed(args: list[str]) -> dict[str, Any]:
    """Return the options of `stemma ARGS`; a flag that there isn't, or a bad value, raises."""
    return load_command(args[0]).make_context(args[0], list(args[1:])).params


def test_manifests_follow_kubernetes_schema() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for one in manifests():
        validator.validate(one, validator.latest_version(), strict=True)
    broken = manifest("PodDisruptionBudget", "stemma-router")
    broken["spec"]["minAvailabel"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, validator.latest_version(), strict=True)


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_pods_run_without_rights(kind: str, name: str) -> None:
    spec = pod(kind, name)
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert f"USER {spec['securityContext']['runAsUser']}:" in (ROOT / "Dockerfile").read_text("utf-8")
    # Variables that Kubernetes makes of services would be read as settings (STEMMA_...).
    assert spec["enableServiceLinks"] is False
    claims = manifest(kind, name)["spec"].get("volumeClaimTemplates", [])
    volumes = {one["name"] for one in spec["volumes"]} | {one["metadata"]["name"] for one in claims}
    assert {one["name"] for one in container["volumeMounts"]} == volumes


def test_names_and_labels_meet() -> None:
    for kind, name in PODS:
        labels = manifest(kind, name)["spec"]["template"]["metadata"]["labels"]
        assert manifest(kind, name)["spec"]["selector"]["matchLabels"] == labels
    servers, router = ({"app": "stemma-server"}, {"app": "stemma-router"})
    assert manifest("StatefulSet", "stemma")["spec"]["template"]["metadata"]["labels"] == servers
    assert manifest("Service", "stemma-servers")["spec"]["selector"] == servers
    assert manifest("Service", "stemma")["spec"]["selector"] == router
    assert manifest("PodDisruptionBudget", "stemma-servers")["spec"]["selector"]["matchLabels"] == servers
    assert manifest("PodDisruptionBudget", "stemma-router")["spec"]["selector"]["matchLabels"] == router
    rule = manifest("NetworkPolicy", "stemma-servers")["spec"]
    assert rule["podSelector"]["matchLabels"] == servers
    assert rule["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == router


def test_servers_flags_are_settings_and_agree_with_the_pod() -> None:
    spec = pod("StatefulSet", "stemma")
    (container,) = spec["containers"]
    fields = setting_fields()
    given = parsed(container["args"])
    flags = {name: value for name, value in given.items() if value is not None and name in fields}
    settings = load_settings(file=None, environ={}, flags=flags)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert settings.server.port == ports["http"]
    assert settings.server.drain_timeout_s + 10 < spec["terminationGracePeriodSeconds"]
    assert settings.engine.model.num_threads == int(container["resources"]["limits"]["cpu"])
    mounts = {one["name"]: Path(one["mountPath"]) for one in container["volumeMounts"]}
    # Not the volume's root: some file systems keep a directory of their own there.
    assert settings.engine.tiers.disk_cache is not None
    assert settings.engine.tiers.disk_cache.parent == mounts["blocks"]
    assert settings.engine.model.path.is_relative_to(mounts["models"])


def test_router_names_every_server_with_its_ports() -> None:
    from stemma_router.routing.server_list import FleetServer

    state = manifest("StatefulSet", "stemma")["spec"]
    (container,) = pod("Deployment", "stemma-router")["containers"]
    options = parsed(container["args"])
    hosts = [f"stemma-{number}.{state['serviceName']}" for number in range(state["replicas"])]
    assert [FleetServer.parse(one) for one in options["server"]] == [
        FleetServer(f"http://{host}:8000", f"tcp://{host}:5557", f"tcp://{host}:5558") for host in hosts
    ]
    assert options["port"] == container["ports"][0]["containerPort"]


PORT = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
    "required": ["number"],
    "additionalProperties": False,
}
LABEL = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
GROUP = r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
KIND = r"^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$"
INFERENCE_POOL = {
    "type": "object",
    "properties": {
        "apiVersion": {"const": "inference.networking.k8s.io/v1"},
        "kind": {"const": "InferencePool"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "properties": {
                "selector": {
                    "type": "object",
                    "properties": {
                        "matchLabels": {
                            "type": "object",
                            "additionalProperties": {"type": "string", "maxLength": 63, "pattern": LABEL},
                        }
                    },
                    "required": ["matchLabels"],
                    "additionalProperties": False,
                },
                "targetPorts": {"type": "array", "items": PORT, "minItems": 1, "maxItems": 1},
                "endpointPickerRef": {
                    "type": "object",
                    "properties": {
                        "group": {"type": "string", "maxLength": 253, "pattern": GROUP},
                        "kind": {"type": "string", "minLength": 1, "maxLength": 63, "pattern": KIND},
                        "name": {"type": "string", "minLength": 1, "maxLength": 253},
                        "port": PORT,
                        "failureMode": {"enum": ["FailOpen", "FailClose"]},
                    },
                    "required": ["name", "port"],  # the port may be left out for other kinds than a Service
                    "additionalProperties": False,
                },
            },
            "required": ["selector", "targetPorts", "endpointPickerRef"],
            "additionalProperties": False,
        },
    },
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
}
"""What version 1.0.0 of the Gateway API Inference Extension allows, by hand: no package has its schema."""


def crds() -> dict[str, dict[str, Any]]:
    """Return the schemas of custom resources in the YAML files of `$STEMMA_CRDS`, by kind."""
    folder = os.environ.get("STEMMA_CRDS")
    if folder is None:
        pytest.skip("STEMMA_CRDS names no directory of custom resource definitions")
    paths = Path(folder).glob("*.yaml")
    found = [one for path in paths for one in yaml.safe_load_all(path.read_text("utf-8"))]
    return {
        one["spec"]["names"]["kind"]: one["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for one in found
    }


def strict(schema: Any) -> Any:
    """Return a definition's schema that refuses unknown fields, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(value) for name, value in schema.items()}
    return {"additionalProperties": False, **closed} if "properties" in schema else closed


def pools() -> list[dict[str, Any]]:
    """Return the example's InferencePool, then ones with a mistake each."""
    text = (CLUSTER / "envoy" / "inference-pool.yaml").read_text("utf-8")
    (pool,) = [one for one in yaml.safe_load_all(text) if one["kind"] == "InferencePool"]
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda spec: spec["endpointPickerRef"].update(portNumber=9002),
        lambda spec: spec["endpointPickerRef"].update(failureMode="Open"),
        lambda spec: spec["endpointPickerRef"].update(group="Core/"),
        lambda spec: spec["endpointPickerRef"].pop("name"),
        lambda spec: spec["targetPorts"].append({"number": 8001}),
        lambda spec: spec["targetPorts"][0].update(number=0),
        lambda spec: spec["selector"].update(app="stemma-server"),
        lambda spec: spec["selector"]["matchLabels"].update(app="a b"),
        lambda spec: spec.pop("selector"),
    ]
    wrong = [copy.deepcopy(pool) for _ in changes]
    for one, change in zip(wrong, changes, strict=True):
        change(one["spec"])
    return [pool, *wrong]


def test_the_schema_by_hand_says_what_the_definition_says() -> None:
    """The real definition isn't ours to keep: `STEMMA_CRDS` names a directory that has it."""
    validator = pytest.importorskip("jsonschema")
    schema = strict(crds()["InferencePool"])
    validator.validate(pools()[0], schema)
    for pool in pools()[1:]:
        with pytest.raises(validator.ValidationError):
            validator.validate(pool, schema)


def test_an_inference_pool_follows_its_api() -> None:
    validator = pytest.importorskip("jsonschema")
    validator.validate(pools()[0], INFERENCE_POOL)
    for pool in pools()[1:]:
        with pytest.raises(validator.ValidationError):
            validator.validate(pool, INFERENCE_POOL)


def test_pickers_before_an_inference_pool() -> None:
    """Kubernetes' own kinds by its schema; no package has HTTPRoute's: it only has to meet the others."""
    validator = pytest.importorskip("kubernetes_validate")
    text = (CLUSTER / "envoy" / "inference-pool.yaml").read_text("utf-8")
    kinds = {one["kind"]: one for one in yaml.safe_load_all(text)}
    for kind in ("Service", "Deployment", "NetworkPolicy"):
        validator.validate(kinds[kind], validator.latest_version(), strict=True)
    pool, service, labels = kinds["InferencePool"]["spec"], kinds["Service"], {"app": "stemma-picker"}
    assert pool["selector"]["matchLabels"] == {"app": "stemma-server"}
    assert pool["endpointPickerRef"]["name"] == service["metadata"]["name"]
    assert pool["endpointPickerRef"]["port"]["number"] == service["spec"]["ports"][0]["port"]
    assert (
        kinds["Deployment"]["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"] == labels
    )
    backend = kinds["HTTPRoute"]["spec"]["rules"][0]["backendRefs"][0]
    assert (backend["kind"], backend["name"]) == ("InferencePool", kinds["InferencePool"]["metadata"]["name"])
    spec = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    options = parsed(container["args"])
    assert options["endpoint_picker"].endswith(f":{container['ports'][0]['containerPort']}")
    from stemma_router.routing.server_list import FleetServer

    servers = FleetServer.parse(options["server"][0])
    assert servers.dns_name == manifest("StatefulSet", "stemma")["spec"]["serviceName"]
    assert pool["targetPorts"][0]["number"] == 8000


def test_dockerfile_passes_hadolint() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint isn't installed")
    command = [linter, "--no-color", "-"]
    text = (ROOT / "Dockerfile").read_bytes()
    done = subprocess.run(command, input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"")
    as_root = subprocess.run(
        command, input=text.replace(b"USER 10001:10001", b"USER root"), capture_output=True, timeout=60
    )
    assert b"DL3002" in as_root.stdout


def test_docker_context_holds_what_is_copied() -> None:
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")
    }
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    copied = {
        name
        for line in lines
        if line.startswith("COPY") and "--from" not in line
        for name in line.split()[1:-1]
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_unit_is_valid(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze isn't installed")
    text = UNIT.read_text("utf-8")
    # The path of the program is checked too; it isn't installed there where tests run.
    assert "/opt/stemma/bin/stemma" in text
    unit = tmp_path / UNIT.name

    def complaints(content: str) -> list[str]:
        unit.write_text(content.replace("/opt/stemma/bin/stemma", sys.executable), "utf-8")
        done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, timeout=60)
        return [line for line in done.stderr.splitlines() if UNIT.name in line]

    assert complaints(text) == []
    assert complaints(text.replace("KillMode=mixed", "KillMode=some")) != []


def test_settings_of_the_unit_load() -> None:
    settings = load_settings(file=UNIT.with_name("stemma.toml"), environ={}, flags={})
    text = UNIT.read_text("utf-8")
    assert f"TimeoutStopSec={round(settings.server.drain_timeout_s) + 30}" in text
    assert settings.engine.tiers.disk_cache is not None
    assert settings.engine.tiers.disk_cache.parent == Path("/var/cache/stemma")
    assert "CacheDirectory=stemma" in text
