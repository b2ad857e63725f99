"""What the command line does without a server."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from polyloom.platform.cli.client import Server
from polyloom.platform.cli.main import cli
from polyloom.platform.cli.packing import packed

HEAVY = ("torch", "transformers", "sqlalchemy", "litestar")


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(arguments), env=env)
    return result.exit_code, result.output


@pytest.mark.parametrize("given", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_servers_url_may_be_the_one_of_openai_clients(given: str) -> None:
    assert Server(given, None).url == "http://h:1"


def test_help_imports_no_model_code() -> None:
    code = (
        "import sys\nfrom polyloom.platform.cli.main import cli\n"
        "try:\n    cli(['--help'])\nexcept SystemExit:\n    pass\n"
        f"sys.exit(str([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert result.stderr.strip() == "[]"
    assert "adapters" in result.stdout


def test_no_server_is_said_plainly() -> None:
    code, output = run("adapters", "list", "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "polyloom serve" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "env", "named"),
    [
        (["serve"], {}, "--base"),
        (["serve", "--base", "b", "--port", "x"], {}, "--port"),
        (["serve", "--base", "b"], {"POLYLOOM_NO_SUCH": "1"}, "POLYLOOM_NO_SUCH"),
    ],
)
def test_serve_names_a_wrong_setting(arguments: list[str], env: dict[str, str], named: str) -> None:
    code, output = run(*arguments, env=env)
    assert code == 1
    assert named in output


def test_serve_names_a_base_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyloom.platform.cli.main", "serve", "--port", "0"]
    command += ["--base", "no-such-base", "--data-dir", str(tmp_path)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert "no-such-base" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_database_goes_up_and_down(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'p.db'}"
    assert run("db", "--database-url", url, "current") == (0, "nothing\n")
    code, output = run("db", "--database-url", url, "upgrade")
    assert code == 0
    assert run("db", "--database-url", url, "current")[1] in output
    assert run("db", "--database-url", url, "downgrade", "base", "--yes")[0] == 0
    assert run("db", "--database-url", url, "current") == (0, "nothing\n")


def test_a_folder_is_packed_without_what_stays_at_home(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "x.log"):
        (tmp_path / name).write_text(name)
    with packed(tmp_path) as upload, tarfile.open(fileobj=upload.file) as archive:
        assert archive.getnames() == ["adapter_config.json", "adapter_model.safetensors"]


def test_what_is_no_adapter_is_not_sent(tmp_path: Path) -> None:
    code, output = run("adapters", "push", str(tmp_path), "--name", "x")
    assert (code, "adapter_config.json" in output) == (1, True)


def test_json_of_a_pull_is_json(tiny_llama_folder: Path, tmp_path: Path) -> None:
    code, output = run(
        "models", "pull", str(tiny_llama_folder), "--json", "--data-dir", str(tmp_path)
    )
    assert code == 0
    assert json.loads(output)["digest"].startswith("sha256:")
