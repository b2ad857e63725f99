"""The script for a machine with a GPU needs no more than it says, and runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_decode import points, populations
from benchmarks.gpu_model import LLAMA_8B

ROOT = Path(__file__).resolve().parents[2]
SERVERS_OWN = {
    "advanced_alchemy", "alembic", "litestar", "llguidance", "msgspec", "opentelemetry", "redis",
    "sqlalchemy", "uvicorn", "zmq",
}  # fmt: skip
BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({SERVERS_OWN!r}))"
RUN = "from benchmarks import gpu_check; sys.exit(gpu_check.main())"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script where importing one of the server's own packages fails."""
    command = [sys.executable, "-c", f"{BLOCKED}; {RUN}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_it_imports_none_of_the_servers_packages() -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr


def test_its_points_cover_what_is_served() -> None:
    named = list(points(LLAMA_8B))
    assert len(named) == len(set(map(str, named))) <= 60
    assert {batch for _, batch, _ in named} == {1, 16, 64, 256}
    assert {one.adapters for one in populations(LLAMA_8B)} == {0, 1, 16, 64, 256, 1000}
    assert {one.rank for one in populations(LLAMA_8B)} == {8, 64, None}
    assert {mix for _, _, mix in named} == {"base", "identical", "zipf", "distinct"}


@pytest.mark.slow
def test_its_dry_run_passes(tmp_path: Path) -> None:
    done = run("--dry-run", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no bar falls short\n")
    assert "not measured" in done.stdout and "tok/s" in (tmp_path / "figures.json").read_text()
