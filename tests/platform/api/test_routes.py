"""Routes, gates and share groups over HTTP, with real answers of real revisions."""

import json
from collections import Counter

import httpx
import pytest
from click.testing import CliRunner

from polyloom.platform.cli.main import cli

PROMPT = "Please open a ticket: my invoice is wrong and the payment failed twice this month. " * 2
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
SHORT = BODY | {"prompt": "Hello there", "max_tokens": 2}


def ask(tenant, model: str, session: str | None = None, **changes) -> httpx.Response:
    headers = {} if session is None else {"x-polyloom-session": session}
    with tenant.http() as client:
        return client.post(
            "/v1/completions", json=BODY | {"model": model} | changes, headers=headers
        )


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.fixture(scope="module")
def owner(server, make_adapter):
    """A tenant with support@1, which is `prod`, and support@2."""
    tenant = server.new_tenant()
    assert tenant.push("support", make_adapter(1)).status_code == 201
    assert tenant.push("support", make_adapter(2), query="wait=true").status_code == 201
    return tenant


def test_a_canary_s_life(owner) -> None:
    with owner.http() as client:

        def put(*targets: tuple[str, int], query: str = "") -> httpx.Response:
            body = {"targets": [{"model": m, "weight": w} for m, w in targets], "reason": "why"}
            return client.put(f"/v1/routes/chat{query}", json=body)

        def asked(session: str) -> str:
            answer = client.post(
                "/v1/completions",
                json=SHORT | {"model": "chat"},
                headers={"x-polyloom-session": session},
            )
            assert answer.headers["x-polyloom-route"].startswith("chat@")
            return str(answer.headers["x-polyloom-revision"])

        plan = put(("support@prod", 3), ("support@2", 1), query="?dry_run=true").json()
        assert (plan["from_version"], plan["refusals"]) == (None, [])
        assert code(client.get("/v1/routes/chat")) == (404, "not_found")
        assert put(("support@prod", 3), ("support@2", 1)).json()["version"] == 1
        sessions = [f"s{i}" for i in range(40)]
        first = {session: asked(session) for session in sessions}
        counts = Counter(first.values())
        assert set(counts) == {"support@1", "support@2"} and 3 <= counts["support@2"] <= 20
        assert all(asked(session) == first[session] for session in sessions[:5])
        put(("support@prod", 1), ("support@2", 1))
        raised = {session: asked(session) for session in sessions}
        assert all(raised[s] == "support@2" for s in sessions if first[s] == "support@2")

        put(("support@2", 1))
        routed = ask(owner, "chat")
        assert text(routed) == text(ask(owner, "support@2")) != text(ask(owner, "support@1"))
        assert routed.json()["model"] == "chat"
        refused = client.delete("/v1/adapters/support/revisions/2")
        assert code(refused) == (409, "conflict") and "'chat'" in refused.text
        assert "chat" in [m["id"] for m in client.get("/v1/models").json()["data"]]

        assert client.post("/v1/routes/chat/rollback", json={"version": 1}).json()["version"] == 4
        history = client.get("/v1/routes/chat/versions").json()["data"]
        assert [(v["version"], v["restores"]) for v in history] == [
            (4, 1),
            (3, None),
            (2, None),
            (1, None),
        ]
        assert client.delete("/v1/routes/chat").status_code == 200
    assert code(ask(owner, "chat")) == (404, "model_not_found")


def test_what_runs_on_a_route_s_revision_finishes_when_it_is_retired(server, make_adapter) -> None:
    tenant = server.new_tenant()
    tenant.push("desk", make_adapter(1), query="wait=true")
    streamed = SHORT | {"model": "desk", "max_tokens": 400, "stream": True}
    with tenant.http() as client, tenant.http() as other:
        client.put("/v1/routes/front", json={"targets": [{"model": "desk@1"}]})
        with client.stream("POST", "/v1/completions", json=streamed | {"model": "front"}) as answer:
            lines = answer.iter_lines()
            next(lines)
            retired = other.delete("/v1/adapters/desk/revisions/1", params={"force": "true"})
            assert retired.json()["state"] == "retired"
            refused = other.post("/v1/completions", json=SHORT | {"model": "front"})
            assert code(refused) == (404, "revision_retired")
            assert "'front' leads to 'desk@1'" in refused.text
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]


def test_a_body_s_user_is_a_session_too(owner) -> None:
    with owner.http() as client:
        targets = [{"model": "support@1"}, {"model": "support@2"}]
        client.put("/v1/routes/half", json={"targets": targets})
    seen = {
        user: {
            ask(owner, "half", user=user, max_tokens=1).headers["x-polyloom-revision"]
            for _ in range(3)
        }
        for user in ("anna", "ben", "carl", "dora", "emil", "fay")
    }
    assert all(len(revisions) == 1 for revisions in seen.values())
    assert len(set.union(*seen.values())) == 2


def test_who_may_not_change_routes(server, owner) -> None:
    key = server.new_key(owner.slug, ["inference", "adapters:read"])
    with server.client(key) as client:
        assert client.get("/v1/routes").status_code == 200
        for method, path in (
            ("PUT", "/v1/routes/chat"),
            ("DELETE", "/v1/routes/chat"),
            ("POST", "/v1/routes/chat/rollback"),
            ("PUT", "/v1/adapters/support/gate"),
            ("POST", "/v1/share-groups"),
        ):
            assert code(client.request(method, path)) == (403, "insufficient_scope"), path
    stranger = server.new_tenant()
    with stranger.http() as client:
        assert client.get("/v1/routes").json()["data"] == []
        for method, path in (
            ("GET", "/v1/routes/half/versions"),
            ("DELETE", "/v1/routes/half"),
            ("GET", "/v1/adapters/support/gate"),
        ):
            assert code(client.request(method, path)) == (404, "not_found"), path


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"targets": []}, "targets"),
        ({"targets": [{"model": "support@1", "weight": "5"}]}, "targets[0].weight"),
        ({"targets": [{"model": "support@1", "share": 1}]}, "targets[0].share"),
        ({"targets": [{"model": "support@1", "weight": 10**30}]}, "targets[0].weight"),
        ({}, "targets"),
        ({"targets": [{"model": "support@1"}], "drafts": 32}, "drafts"),
        ({"targets": [{"model": "support@1"}], "drafts": "always"}, "drafts"),
    ],
)
def test_a_bad_route_is_refused_by_its_field(owner, body: dict, param: str) -> None:
    with owner.http() as client:
        refused = client.put("/v1/routes/bad", json=body)
    assert code(refused) == (400, "invalid_request")
    assert refused.json()["error"]["param"] == param


def test_a_gate_lets_only_who_answers_as_expected_be_promoted(server, make_adapter) -> None:
    tenant = server.new_tenant()
    tenant.push("desk", make_adapter(1))
    tenant.push("desk", make_adapter(2), query="wait=true")
    golden = {"name": "ticket", "prompt": PROMPT, "max_tokens": 8}
    with tenant.http() as client:
        answer = client.post("/v1/completions", json=BODY | {"model": "desk@1"})
        prompts = [golden | {"expect": {"equals": text(answer)}}]
        gate = client.put("/v1/adapters/desk/gate", json={"prompts": prompts})
        assert gate.json()["version"] == 1
        alias = "/v1/adapters/desk/aliases/prod"
        refused = client.put(alias, json={"revision": 2})
        assert code(refused) == (422, "gate_failed")
        assert refused.json()["error"]["param"] == "ticket"
        assert "desk@2 does not pass the gate" in refused.json()["error"]["message"]
        assert client.get(alias).json()["number"] == 1
        assert client.put("/v1/adapters/desk/aliases/stable", json={"revision": 1}).is_success
        third = tenant.push("desk", make_adapter(3)).json()
        assert third["state"] == "ready" and "'ticket'" in third["not_promoted"]
        again = tenant.push("desk", make_adapter(3))
        assert code(again) == (422, "gate_failed")
        assert client.get(alias).json()["number"] == 1
        runs = client.get("/v1/adapters/desk/gate/runs").json()["data"]
        assert [(r["candidate"], r["passed"]) for r in runs] == [
            ("desk@3", False),
            ("desk@3", False),
            ("desk@1", True),
            ("desk@2", False),
        ]
        client.put("/v1/adapters/desk/gate", json={"prompts": []})
        assert client.put(alias, json={"revision": 2}).json()["number"] == 2


def test_a_member_shares_the_group_s_cache_until_it_is_revoked(server, owner) -> None:
    member, stranger = server.new_tenant(), server.new_tenant()
    with owner.http() as mine, member.http() as theirs:
        group = mine.post("/v1/share-groups", json={"name": "team"}).json()
        mine.put("/v1/share-groups/team/adapters/support", json={"revision": 1})
        mine.put(f"/v1/share-groups/team/members/{member.slug}")
        joined = theirs.put(f"/v1/memberships/{group['id']}", json={"mount": "friends"})
        assert joined.json()["mount"] == "friends"
        assert cached(ask(owner, "team/support", cache_salt="one")) == 0
        warm = ask(member, "friends/support", cache_salt="one")
        assert cached(warm) > 0
        assert warm.headers["x-polyloom-revision"] == "friends/support@1"
        assert text(warm) == text(ask(owner, "support@1", cache_salt="one"))
        assert cached(ask(member, "friends/support", cache_salt="two")) == 0
        assert "friends/support" in [m["id"] for m in theirs.get("/v1/models").json()["data"]]
        assert code(ask(stranger, "friends/support")) == (404, "model_not_found")

        mine.delete("/v1/share-groups/team/adapters/support")
        assert code(ask(member, "friends/support")) == (404, "model_not_found")
        mine.put("/v1/share-groups/team/adapters/support", json={"revision": 1})
        assert cached(ask(member, "friends/support", cache_salt="one")) == 0
        assert mine.delete("/v1/share-groups/team").status_code == 204
    assert code(ask(member, "friends/support")) == (404, "model_not_found")


def test_the_command_line_does_all_of_it(server, owner, tmp_path) -> None:
    member = server.new_tenant()

    def run(tenant, *arguments: str, exit_code: int = 0) -> str:
        environment = {"POLYLOOM_URL": server.url, "POLYLOOM_API_KEY": tenant.key}
        result = CliRunner().invoke(cli, list(arguments), env=environment)
        assert result.exit_code == exit_code, result.output
        return result.output

    planned = run(owner, "routes", "set", "cli", "support@1=3", "support@9", "--dry-run")
    assert "75.0%" in planned and "would be refused" in planned
    first = run(owner, "routes", "set", "cli", "support@1=3", "support@2", "--drafts", "3")
    assert "version 1" in first and "drafts: 3" in first
    run(owner, "routes", "set", "cli", "support@2", "--reason", "all of it")
    assert "all of it" in run(owner, "routes", "versions", "cli")
    assert "support@1=3, support@2=1" in run(owner, "routes", "rollback", "cli")
    assert "cli" in run(owner, "routes", "list")
    file = tmp_path / "gate.json"
    prompts = [{"name": "p", "prompt": "Hello", "max_tokens": 4, "expect": {"contains": "\n\n\n"}}]
    file.write_text(json.dumps(prompts))
    assert "1 prompts" in run(owner, "gates", "set", str(file), "--route", "cli")
    run(owner, "routes", "set", "cli", "support@prod=1")
    refused = run(owner, "routes", "set", "cli", "support@2=1", exit_code=1)
    assert "gate_failed" in refused
    assert "expected one that contains" in run(owner, "gates", "runs", "--route", "cli")
    assert json.loads(run(owner, "routes", "show", "cli", "--json"))["version"] == 4
    assert "deleted" in run(owner, "routes", "delete", "cli", "--yes")

    group = json.loads(run(owner, "shares", "create", "crew", "--json"))["id"]
    run(owner, "shares", "add", "crew", "support", "1")
    run(owner, "shares", "base", "crew")
    run(owner, "shares", "invite", "crew", member.slug)
    assert "(invited)" in run(member, "shares", "list")
    assert "pals" in run(member, "shares", "accept", group, "--as", "pals")
    assert "pals/support@1>" in run(member, "chat", "pals/support", "-m", "Hi", "--max-tokens", "2")
    assert "left" in run(member, "shares", "leave", group)
    run(owner, "shares", "remove", "crew", member.slug, exit_code=1)
    assert "deleted" in run(owner, "shares", "delete", "crew", "--yes")
