"""The command line against a real server: push, look, promote, roll back, chat, retire."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from polyloom.platform.cli.main import cli


class Shell:
    """Runs commands as one tenant, or as the operator."""

    def __init__(self, url: str, key: str) -> None:
        self._env = {"POLYLOOM_URL": url, "POLYLOOM_API_KEY": key}

    def __call__(self, *arguments: str) -> str:
        result = CliRunner().invoke(cli, list(arguments), env=self._env)
        assert result.exit_code == 0, result.output
        return result.output

    def fails(self, *arguments: str) -> str:
        result = CliRunner().invoke(cli, list(arguments), env=self._env)
        assert result.exit_code == 1, result.output
        return result.output


@pytest.fixture
def shell(server) -> Shell:
    tenant = server.new_tenant()
    return Shell(server.url, tenant.key)


def test_a_revision_s_life(shell: Shell, make_adapter, base_name: str) -> None:
    assert "desk@1 is ready" in shell(
        "adapters", "push", str(make_adapter(1)), "--name", "desk", "--promote", "prod"
    )
    pushed = json.loads(shell("adapters", "push", str(make_adapter(2)), "--name", "desk", "--json"))
    assert (pushed["number"], pushed["state"]) == (2, "ready")
    assert "already" in shell("adapters", "push", str(make_adapter(2)), "--name", "desk")
    assert "prod → 1" in shell("adapters", "list")
    assert "→ 2" in shell("adapters", "promote", "desk", "2")
    assert "desk@2>" in shell("chat", "desk", "-m", "Hello", "--max-tokens", "3")
    assert "→ 1" in shell("adapters", "rollback", "desk")
    assert "retired" in shell("adapters", "retire", "desk", "2", "--yes")
    assert "revision_retired" in shell.fails("chat", "desk@2", "-m", "Hello")
    states = {
        r["number"]: r["state"]
        for r in json.loads(shell("adapters", "revisions", "desk", "--json"))["revisions"]
    }
    assert states == {1: "ready", 2: "retired"}
    assert base_name in shell("models", "list")


def test_a_bad_folder_names_what_is_wrong(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    output = shell.fails("adapters", "push", str(tmp_path), "--name", "bad")
    assert "adapter_model.safetensors" in output
    assert "invalid_adapter" in output


def test_the_operator_s_commands(server) -> None:
    operator = Shell(server.url, server.admin_key)
    slug = "cli-tenant"
    operator("tenants", "create", slug, "--adapters", "2")
    assert slug in operator("tenants", "list")
    issued = json.loads(operator("keys", "create", slug, "--scope", "inference", "--json"))
    assert "inference" in operator("keys", "list", slug)
    user = Shell(server.url, issued["key"])
    assert "insufficient_scope" in user.fails("adapters", "list")
    assert "revoked" in operator("keys", "revoke", slug, str(issued["id"]))
    assert "POLYLOOM_API_KEY" in user.fails("models", "list")


def test_prefix_caches_are_explained_reported_held_and_emptied(
    server, base_name: str, tmp_path: Path
) -> None:
    tenant = server.new_tenant()
    shell, operator = (Shell(server.url, key) for key in (tenant.key, server.admin_key))
    system = "You answer questions about invoices and payments of our customers, and briefly. "
    files = []
    with tenant.http() as client:
        for minute in (13, 14):
            text = f"{system}It is 2026-11-29 22:{minute}. {system}"
            body = {"model": base_name, "prompt": text, "max_tokens": 1}
            client.post("/v1/completions", json=body).raise_for_status()
            files.append(tmp_path / f"{minute}.json")
            files[-1].write_text(json.dumps(body))
    explained = shell("cache", "explain", *map(str, files))
    assert "tokens (timestamp)" in explained
    assert not explained.startswith("0 blocks")
    report = shell("cache", "report")
    assert "isolation self-check: ok" in report
    assert "earlier: '3" in report
    everybody = operator("cache", "report", "--all")
    assert tenant.slug in everybody
    assert "22:1" not in everybody
    hold = ("prefixes", "hold", "s", "--model", base_name, "--system", system)
    assert "held in 1 engines" in shell(*hold)
    assert "a prefix 's' is held already" in shell.fails(*hold)
    assert base_name in shell("prefixes", "list")
    assert "released" in shell("prefixes", "release", "s")
    assert json.loads(shell("prefixes", "list", "--json"))["data"] == []
    dropped = operator("cache", "invalidate", "--tenant", tenant.slug)
    assert "blocks freed" in dropped
    assert not dropped.startswith("invalidated; 0 ")
