"""Two servers on one PostgreSQL and one Redis: what one is told, the other serves."""

import time
from pathlib import Path

import httpx
import pytest

BODY = {"prompt": "Hello", "max_tokens": 1, "temperature": 0}
WITHIN_SECONDS = 1.0


def seconds_until(client: httpx.Client, model: str, revision: str, versions: list[int]) -> float:
    """How long until `client`'s server answers `model` by `revision`, noting each answer's version
    of the routes."""
    begun = time.monotonic()
    while time.monotonic() < begun + 30:
        answer = client.post("/v1/completions", json=BODY | {"model": model})
        if answer.status_code == 200:
            versions.append(int(answer.headers["x-polyloom-route-version"]))
            if answer.headers["x-polyloom-revision"] == revision:
                return time.monotonic() - begun
    raise AssertionError(answer.text)


@pytest.mark.slow
@pytest.mark.parametrize("new_databases", ["postgresql"], indirect=True)
async def test_a_change_at_one_is_served_by_the_other_within_a_second(
    serve_another,
    database_url: str,
    redis_url: str,
    tiny_llama_folder,
    make_adapter,
    tmp_path: Path,
) -> None:
    shared = {
        "database_url": database_url,
        "redis_url": redis_url,
        "data_dir": tmp_path / "data",
    }
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with (
        serve_another(tiny_llama_folder, folders[0], **shared) as one,
        serve_another(tiny_llama_folder, folders[1], **shared) as two,
    ):
        tenant = one.new_tenant()
        for seed in (1, 2):
            assert tenant.push("support", make_adapter(seed)).status_code == 201
        versions: list[int] = []
        took: list[float] = []
        with tenant.http() as here, two.client(tenant.key) as there:
            seconds_until(there, "support", "support@2", versions)
            for number in (1, 2, 1, 2):
                alias = here.put("/v1/adapters/support/aliases/prod", json={"revision": number})
                assert alias.status_code == 200, alias.text
                took.append(seconds_until(there, "support", f"support@{number}", versions))
                route = {"targets": [{"model": f"support@{number}"}]}
                assert here.put("/v1/routes/chat", json=route).status_code == 200
                took.append(seconds_until(there, "chat", f"support@{number}", versions))
            assert here.delete("/v1/routes/chat").status_code == 200
    assert max(took) < WITHIN_SECONDS, took
    assert versions == sorted(versions)
