"""What can be checked of the deployment files without a Docker engine."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from polyloom.platform.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


def stages() -> set[str]:
    return set(re.findall(r"^FROM .* AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))


def test_compose_builds_a_stage_that_exists(compose: dict[str, Any]) -> None:
    for name in ("server", "migrate"):
        assert compose["services"][name]["build"]["target"] in stages()
        assert (DEPLOY / compose["services"][name]["build"]["context"]).resolve() == ROOT


def test_dockerfile_copies_only_what_exists() -> None:
    for source in re.findall(
        r"^COPY (?!--from)(\S+) ", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
    ):
        assert (ROOT / source).exists(), source


def test_commands_are_commands_of_the_cli(compose: dict[str, Any]) -> None:
    for name in ("server", "migrate"):
        command: click.Command | None = cli
        for word in compose["services"][name]["command"]:
            if isinstance(command, click.Group):
                command = command.get_command(click.Context(command), word)
                assert command is not None, f"{name}: no command {word}"


def test_variables_are_in_the_example(compose: dict[str, Any]) -> None:
    example = (DEPLOY / "env.example").read_text()
    for variable in re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text()):
        assert f"{variable}=" in example, variable


def test_dependencies_and_volumes_are_declared(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert set(service.get("depends_on", ())) <= set(compose["services"]), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), volume


def test_the_collector_scrapes_the_server(compose: dict[str, Any]) -> None:
    collector = yaml.safe_load((DEPLOY / "collector.yaml").read_text())
    (job,) = collector["receivers"]["prometheus"]["config"]["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in compose["services"]
    assert compose["services"][host]["ports"][0].endswith(f":{port}")
    pipeline = collector["service"]["pipelines"]["metrics"]
    assert set(pipeline["receivers"]) <= set(collector["receivers"])
    assert set(pipeline["exporters"]) <= set(collector["exporters"])
