"""Draft heads through a whole server: trained on the command line, pushed, promoted, drafted with."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from polyloom.platform.cli.main import cli

if TYPE_CHECKING:
    from conftest import RunningServer, Tenant

PROMPT = "The quick brown fox"


def run(server: "RunningServer", key: str, *arguments: object, exit_code: int = 0) -> str:
    environment = {"POLYLOOM_URL": server.url, "POLYLOOM_API_KEY": key}
    result = CliRunner().invoke(cli, ["draft-heads", *map(str, arguments)], env=environment)
    assert result.exit_code == exit_code, result.output
    return result.stdout if exit_code == 0 else result.output


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines: list[Any] = [f"Say {number} again." for number in range(24)]
    lines += [{"prompt": f"{number} and"} for number in range(16)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def completion(tenant: "Tenant", model: str) -> tuple[str, dict[str, Any]]:
    with tenant.http() as client:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "seed": 1}
        answer = client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return answer.json()["choices"][0]["text"], answer.json()


def test_heads_are_trained_pushed_and_drafted_with(
    server: "RunningServer",
    make_adapter: Any,
    tiny_llama_folder: Path,
    prompts: Path,
    tmp_path: Path,
) -> None:
    tenant, admin = server.new_tenant(), server.admin_key
    assert tenant.push("drafted", make_adapter(5)).status_code == 201
    plain, before = completion(tenant, "drafted@1")
    common = ["--prompts", prompts, "--epochs", 1, "--max-tokens", 8, "--json"]
    common += ["--data-dir", server.log.parent / "data", "--base", tiny_llama_folder]

    shared, own = tmp_path / "shared", tmp_path / "own"
    trained = json.loads(run(server, admin, "train", *common, "--out", shared))
    assert trained["training"]["gate"]["prompts"] == 4
    assert "is ready and drafts" in run(server, admin, "push", shared, "--promote")
    _, with_shared = completion(tenant, "drafted@1")
    assert with_shared["system_fingerprint"] != before["system_fingerprint"]

    adapter = ["--adapter", "drafted@prod"]
    trained = json.loads(run(server, tenant.key, "train", *common, *adapter, "--out", own))
    assert trained["rank"] == 64 and trained["adapter_digest"] is not None
    run(server, tenant.key, "push", own, *adapter, "--promote")
    for _ in range(3):  # the head is loaded beside the first one
        assert completion(tenant, "drafted@1")[0] == plain
    assert "drafts" in run(server, tenant.key, "list", *adapter)

    refused = run(server, tenant.key, "push", shared, *adapter, exit_code=1)
    assert "adapter_digest" in refused and "invalid_adapter" in refused
    run(server, tenant.key, "push", shared, exit_code=1)  # only the operator's key may
    other = server.new_tenant()
    run(server, other.key, "list", "--adapter", "drafted@1", exit_code=1)
    assert "retired and does not draft" in run(server, tenant.key, "retire", 1, *adapter)
    run(server, admin, "retire", 1)
    assert completion(tenant, "drafted@1")[1]["system_fingerprint"] == before["system_fingerprint"]


def test_training_says_what_is_wrong_with_its_inputs(
    server: "RunningServer", prompts: Path, tiny_llama_folder: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('"fine"\n{"messages": [], "prompt": "x"}\n')
    out = ["--out", tmp_path / "out", "--data-dir", tmp_path / "data", "--base", tiny_llama_folder]
    said = run(server, "none", "train", "--prompts", bad, *out, exit_code=1)
    assert "line 2" in said
    said = run(server, "none", "train", "--prompts", prompts, "--out", tmp_path, exit_code=2)
    assert "--base or --adapter" in said
    adapter = ["--adapter", "nobody@1"]
    said = run(server, "none", "train", "--prompts", prompts, *out, *adapter, exit_code=1)
    assert "invalid_api_key" in said
