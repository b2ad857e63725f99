"""A revision's life over HTTP, and the wrong answers that must never be given."""

import json
import shutil

import pytest

PROMPT = {"prompt": "Hello there", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def ask(tenant, model: str):
    with tenant.http() as client:
        return client.post("/v1/completions", json=PROMPT | {"model": model})


def text(tenant, model: str) -> str:
    answer = ask(tenant, model)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def code(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_revision_s_life(server, base_name, make_adapter) -> None:
    tenant = server.new_tenant()
    first = tenant.push("support", make_adapter(1))
    assert (first.status_code, first.json()["state"]) == (201, "ready")
    assert first.json()["max_logprob_diff"] <= 1e-3
    answer = ask(tenant, "support")
    assert answer.headers["x-polyloom-revision"] == "support@1"
    one = answer.json()["choices"][0]["text"]
    assert one != text(tenant, base_name)

    again = tenant.push("support", make_adapter(1))
    assert (again.status_code, again.json()["number"]) == (200, 1)

    second = tenant.push("support", make_adapter(2), query="wait=true")
    assert second.json()["number"] == 2
    assert text(tenant, "support") == one
    two = text(tenant, "support@2")
    assert two != one

    with tenant.http() as client:
        alias = "/v1/adapters/support/aliases/prod"
        assert client.put(alias, json={"revision": 2}).json()["number"] == 2
        assert text(tenant, "support") == two
        assert client.post(f"{alias}/rollback").json()["number"] == 1
        assert text(tenant, "support") == one
        history = client.get(f"{alias}/history").json()["data"]
        assert [c["number"] for c in history] == [1, 2, 1]
        retired = client.delete("/v1/adapters/support/revisions/1")
        assert (retired.status_code, retired.json()["state"]) == (200, "retired")
    assert code(ask(tenant, "support")) == (404, "revision_retired")
    assert code(ask(tenant, "support@1")) == (404, "revision_retired")
    assert text(tenant, "support@2") == two


def test_what_does_not_resolve_is_never_the_base(server, make_adapter) -> None:
    tenant = server.new_tenant()
    tenant.push("loose", make_adapter(1), query="wait=true")
    assert code(ask(tenant, "loose")) == (404, "no_default_revision")
    for model in ("nothing", "loose@7", "loose@canary", "nothing@1"):
        assert code(ask(tenant, model)) == (404, "model_not_found")


def test_two_tenants_with_one_name_are_apart(server, make_adapter) -> None:
    mine, theirs = server.new_tenant(), server.new_tenant()
    mine.push("support", make_adapter(1))
    theirs.push("support", make_adapter(2))
    a, b = ask(mine, "support").json(), ask(theirs, "support").json()
    assert a["choices"][0]["text"] != b["choices"][0]["text"]
    assert a["system_fingerprint"] != b["system_fingerprint"]
    names = [m.id for m in theirs.openai().models.list()]
    assert names.count("support") == 1


def test_another_tenant_s_adapter_does_not_exist(server, make_adapter) -> None:
    owner, stranger = server.new_tenant(), server.new_tenant()
    owner.push("private", make_adapter(1))
    digest = owner.http().get("/v1/adapters/private/revisions/1").json()["digest"]
    for model in ("private", "private@1", f"private@{digest[:20]}"):
        assert code(ask(stranger, model)) == (404, "model_not_found")
    with stranger.http() as client:
        assert client.get("/v1/adapters").json()["data"] == []
        for method, path in (
            ("GET", "/v1/adapters/private"),
            ("GET", "/v1/adapters/private/revisions/1"),
            ("DELETE", "/v1/adapters/private/revisions/1"),
            ("GET", "/v1/adapters/private/aliases/prod"),
            ("POST", "/v1/adapters/private/aliases/prod/rollback"),
        ):
            assert code(client.request(method, path)) == (404, "not_found"), path
    assert ask(owner, "private").status_code == 200


@pytest.mark.parametrize("name", ["org/support", "ft:base:acme:1", "a.b-c_d"])
def test_names_with_every_legal_character(server, make_adapter, name: str) -> None:
    tenant = server.new_tenant()
    quoted = name.replace("/", "%2F")
    assert tenant.push(quoted, make_adapter(1)).json()["adapter"] == name
    assert ask(tenant, name).headers["x-polyloom-revision"] == f"{name}@1"
    assert tenant.http().get(f"/v1/adapters/{quoted}").json()["name"] == name


def test_a_bad_upload_is_refused_by_name_and_leaves_nothing(server, make_adapter, tmp_path) -> None:
    tenant = server.new_tenant()
    folder = tmp_path / "bad"
    shutil.copytree(make_adapter(1), folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 7}))
    refused = tenant.push("bad", folder)
    assert code(refused) == (422, "invalid_adapter")
    assert refused.json()["error"]["param"]
    empty = tenant.http().post("/v1/adapters/bad/revisions", content=b"not an archive")
    assert code(empty) == (422, "invalid_adapter")
    assert tenant.http().get("/v1/adapters").json()["data"] == []


def test_too_large_an_upload_is_413(server, make_adapter) -> None:
    tenant = server.new_tenant()
    answer = tenant.http().post(
        "/v1/adapters/big/revisions",
        content=b"\0" * (5 << 20),
        headers={"content-type": "application/x-tar"},
    )
    assert code(answer) == (413, "too_large")


def test_files_one_by_one(server, make_adapter) -> None:
    tenant = server.new_tenant()
    files = [
        ("files", (path.name, path.read_bytes(), "application/octet-stream"))
        for path in sorted(make_adapter(3).iterdir())
    ]
    with tenant.http() as client:
        answer = client.post("/v1/adapters/parts/revisions?wait=true&promote=prod", files=files)
    assert answer.status_code == 201, answer.text
    assert answer.json()["state"] == "ready"
    assert ask(tenant, "parts").status_code == 200


def test_a_batch_mixes_base_and_adapters(server, base_name, make_adapter) -> None:
    """Concurrent answers are the solo ones: no row takes a neighbour's weights."""
    from concurrent.futures import ThreadPoolExecutor

    tenant = server.new_tenant()
    for number in (1, 2, 3):
        tenant.push(f"a{number}", make_adapter(number))
    models = [base_name, "a1", "a2", "a3"]
    alone = {model: text(tenant, model) for model in models}
    assert len(set(alone.values())) == 4
    with ThreadPoolExecutor(16) as pool:
        mixed = list(pool.map(lambda model: (model, text(tenant, model)), models * 4))
    assert all(answer == alone[model] for model, answer in mixed)
