"""Files for Ray and KubeRay, against the schemas that there are. Nothing is started."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from stemma_router.cluster_file import read_cluster_file

FOLDER = Path(__file__).parents[3] / "examples" / "cluster"
RAY = FOLDER / "ray"


def documents() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    config, service, policy = yaml.safe_load_all((RAY / "rayservice.yaml").read_text("utf-8"))
    return config, service, policy


def service() -> tuple[dict[str, Any], dict[str, Any]]:
    return documents()[:2]


def test_cluster_files_are_read_and_say_the_same(tmp_path: Path) -> None:
    cluster = read_cluster_file(RAY / "cluster.yaml")
    (tmp_path / "cluster.yaml").write_text(service()[0]["data"]["cluster.yaml"])
    in_service = read_cluster_file(tmp_path / "cluster.yaml")
    assert in_service.replicas == cluster.replicas
    assert in_service.settings.engine == cluster.settings.engine
    plan = read_cluster_file(FOLDER / "local" / "prefill-decode.yaml").prefill_decode
    assert plan is not None
    assert (plan.num_prefill, plan.num_decode, len(plan.pools)) == (2, 2, 2)


def test_the_launcher_follows_rays_schema() -> None:
    spec = find_spec("ray")
    if spec is None or spec.origin is None:
        pytest.skip("the extra `ray` isn't installed")
    schema = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text("utf-8"))
    launcher = yaml.safe_load((RAY / "launcher.yaml").read_text("utf-8"))
    jsonschema.validate(launcher, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**launcher, "min_worker": 1}, schema)
    mounts = dict(launcher["file_mounts"])
    assert mounts.pop(f"/home/{launcher['auth']['ssh_user']}/.ray/auth_token") == "~/.ray/auth_token"
    for name in mounts.values():
        assert (RAY / name).exists()


def test_nobody_starts_a_ray_without_a_token() -> None:
    launcher = yaml.safe_load((RAY / "launcher.yaml").read_text("utf-8"))
    commands = [*launcher["head_start_ray_commands"], *launcher["worker_start_ray_commands"]]
    starting = [command for command in commands if "ray start" in command]
    assert len(starting) == 2
    assert all("RAY_AUTH_MODE=token " in command for command in starting)
    assert service()[1]["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_only_rays_pods_and_the_operator_reach_rays_ports() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    policy = documents()[2]
    validator.validate(policy, validator.latest_version(), strict=True)
    labels = policy["spec"]["podSelector"]["matchLabels"]
    cluster = service()[1]["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert labels.items() <= group["template"]["metadata"]["labels"].items()
    everywhere = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
    assert [rule["from"] for rule in everywhere] == [[{"podSelector": {"matchLabels": labels}}]]


def test_probes_run_nothing_that_the_image_lacks() -> None:
    """KubeRay adds probes of its own, which call wget, where there are none."""
    cluster = service()[1]["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        for probe in (container["readinessProbe"], container["livenessProbe"]):
            assert {"httpGet", "tcpSocket"} & set(probe)
            assert "exec" not in probe


def test_the_services_pods_follow_kubernetes_schema() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    config, ray_service = service()
    validator.validate(config, validator.latest_version(), strict=True)
    cluster = ray_service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        validator.validate(pod, validator.latest_version(), strict=True)
        (container,) = pod["spec"]["containers"]
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        assert set(mounts.values()) == {one["name"] for one in pod["spec"]["volumes"]}
        assert {"/models", "/var/cache/stemma", "/etc/stemma", "/etc/stemma-keys"} == set(mounts)
    replicas = read_cluster_file(RAY / "cluster.yaml").replicas
    assert replicas is not None
    assert cluster["workerGroupSpecs"][0]["maxReplicas"] == replicas.at_most


def test_the_services_application_is_one_of_ours() -> None:
    pytest.importorskip("ray", reason="the extra `ray` isn't installed")
    from ray.serve.schema import ServeDeploySchema

    from stemma_router.replicas import application

    spec = ServeDeploySchema.model_validate(yaml.safe_load(service()[1]["spec"]["serveConfigV2"]))
    (app,) = spec.applications
    assert app.import_path == f"{application.__name__}:{application.from_file.__name__}"
    assert set(app.args) == {"file"}
