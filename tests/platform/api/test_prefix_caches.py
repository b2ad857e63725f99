"""Prefix caches over HTTP: what is reused, why not, what is held, and what nobody else may see."""

import time

import httpx
import pytest

SYSTEM = (
    "You answer questions about invoices, payments and tickets of our customers. Be brief, name the "
    "ticket, never guess a number, and say which document you took it from. "
)


def chat(model: str, user: str, system: str = SYSTEM, **more: object) -> dict:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0, **more}


def ask(client: httpx.Client, body: dict) -> int:
    """Cached tokens of the answer."""
    answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def explain(client: httpx.Client, first: dict, second: dict) -> dict:
    answer = client.post("/v1/cache/explain", json={"first": first, "second": second})
    assert answer.status_code == 200, answer.text
    return answer.json()


def fields(explanation: dict) -> list[str]:
    return [difference["field"] for difference in explanation["differences"]]


@pytest.fixture
def owner(server):
    """A tenant of this test alone."""
    return server.new_tenant()


def test_the_report_counts_hits_and_names_what_differed(owner, base_name) -> None:
    with owner.http() as client:
        stamped = [SYSTEM + f"It is 2026-11-29 22:{minute}. " + SYSTEM for minute in (13, 14)]
        assert ask(client, chat(base_name, "Hi", stamped[0])) == 0
        assert ask(client, chat(base_name, "Hi", stamped[0])) > 0
        part = ask(client, chat(base_name, "Hi", stamped[1]))
        assert ask(client, chat(base_name, "Hi", stamped[0], cache_salt="x")) == 0
        report = client.get("/v1/cache").json()
    total = report["account"]["total"]
    assert (total["eligible_requests"], total["exact_hits"], total["hit_rate"]) == (4, 2, 0.5)
    assert total["tokens_reused"] > part > 0
    assert total["bytes_reused"] > 0 and total["cached_blocks"] > 0
    assert total["misses"] == {"first": 1, "salt": 1, "tokens": 1}
    assert report["account"]["isolation"] == {"checked_hits": None, "cross_namespace_hits": 0}
    salt, tokens, first = report["recent_misses"]
    assert (salt["reason"], first["reason"]) == ("salt", "first")
    assert tokens["before"].endswith("22:1")
    assert (tokens["expected"][0], tokens["found"][0]) == ("3", "4")


def test_explain_tells_the_kinds_of_difference_apart(owner, base_name) -> None:
    def differing(first: str, second: str) -> dict:
        return explain(client, *(chat(base_name, "Hi", SYSTEM + text) for text in (first, second)))

    with owner.http() as client:
        same = explain(client, chat(base_name, "Hi"), chat(base_name, "Hi"))
        assert same["differences"] == [] and same["shared_blocks"] > 1
        assert ask(client, chat(base_name, "Hi")) == 0
        assert ask(client, chat(base_name, "Hi")) // 16 == same["shared_blocks"]

        kinds = {
            "timestamp": ("At 2026-11-29T22:13:11Z.", "At 2026-11-29T22:14:00Z."),
            "secret": ("Key sk-abcd1234efgh5678.", "Key sk-abcd9999zzzz0000."),
            "id": ("Run 4f9a1c0b77de23aa.", "Run 9b00e13377aa20ff."),
            "text": ("Be kind.", "Be stern."),
        }
        for kind, texts in kinds.items():
            found = differing(*texts)
            assert fields(found) == ["tokens"]
            (difference,) = found["differences"]
            assert difference["kind"] == kind and difference["position"] == found["common_tokens"]
            assert difference["first"] != difference["second"]

        salted = explain(
            client, chat(base_name, "Hi", cache_salt="a"), chat(base_name, "Hi", cache_salt="b")
        )
        assert fields(salted) == ["salt"] and salted["shared_blocks"] == 0
        tools = [{"type": "function", "function": {"name": n, "parameters": {}}} for n in "ab"]
        differ = explain(
            client, chat(base_name, "Hi", tools=tools[:1]), chat(base_name, "Hi", tools=tools)
        )
        assert fields(differ) == ["tools", "tokens"]  # the prompt describes them
        assert differ["shared_blocks"] == 0
        unused = chat(base_name, "Hi", tools=tools, tool_choice="none")
        assert explain(client, chat(base_name, "Hi"), unused)["differences"] == []


def test_explain_names_the_side_that_is_wrong(owner, base_name) -> None:
    with owner.http() as client:
        for body, param in (
            ({"first": chat(base_name, "Hi"), "second": {"model": base_name}}, "second"),
            ({"first": chat(base_name, "Hi", top=1), "second": chat(base_name, "Hi")}, "first"),
            ({"first": [], "second": chat(base_name, "Hi")}, "first"),
        ):
            answer = client.post("/v1/cache/explain", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param


def test_a_held_prefix_is_warm_for_its_first_request_and_ends(owner, base_name) -> None:
    body = {"name": "support", "model": base_name}
    body["messages"] = [{"role": "system", "content": SYSTEM * 2}]
    with owner.http() as client:
        held = client.post("/v1/prefixes", json=body)
        assert held.status_code == 201, held.text
        assert (held.json()["engines"], held.json()["failure"]) == (1, None)
        tokens = held.json()["tokens"]
        assert ask(client, chat(base_name, "Hi", SYSTEM * 2)) // 16 >= tokens // 16 > 1
        assert client.post("/v1/prefixes", json=body).status_code == 409
        assert [h["name"] for h in client.get("/v1/prefixes").json()["data"]] == ["support"]
        total = client.get("/v1/cache").json()["account"]["total"]
        assert (total["held_blocks"], total["hit_rate"]) == (tokens // 16, 1)
        assert client.delete("/v1/prefixes/support").status_code == 204
        assert client.delete("/v1/prefixes/support").status_code == 404
        assert client.get("/v1/cache").json()["account"]["total"]["held_blocks"] == 0


def test_a_held_prefix_survives_an_invalidation(owner, base_name) -> None:
    body = {"name": "p", "model": base_name, "prompt": SYSTEM * 2}
    with owner.http() as client:
        assert client.post("/v1/prefixes", json=body).status_code == 201
        dropped = client.delete("/v1/cache").json()
        assert dropped["cause"] == "tenant_purged" and dropped["blocks_freed"] > 1
        give_up = time.monotonic() + 20
        while client.get("/v1/prefixes").json()["data"][0]["engines"] == 0:
            assert time.monotonic() < give_up
            time.sleep(0.1)
        assert client.delete("/v1/prefixes/p").status_code == 204


def test_holds_have_limits(owner, base_name) -> None:
    with owner.http() as client:
        for number in range(16):
            body = {"name": f"p{number}", "model": base_name, "prompt": f"{number} {SYSTEM}"}
            assert client.post("/v1/prefixes", json=body).status_code == 201
        full = client.post("/v1/prefixes", json=body | {"name": "one-more"})
        assert (full.status_code, full.json()["error"]["code"]) == (429, "quota_exceeded")
        wrong = [
            ({"name": "", "model": base_name, "prompt": "x"}, "name"),
            ({"name": "x", "model": base_name}, "messages"),
            ({"name": "x", "model": base_name, "messages": []}, "messages"),
            ({"name": "x", "model": "nobody's", "prompt": "x"}, "model"),
        ]
        for body, param in wrong:
            answer = client.post("/v1/prefixes", json=body)
            assert answer.status_code in (400, 404)
            assert answer.json()["error"]["param"] == param
        for number in range(16):
            client.delete(f"/v1/prefixes/p{number}")


def test_others_see_neither_texts_nor_hits(server, owner, base_name) -> None:
    secret = "The launch code is tangerine-7741. " * 6
    other = server.new_tenant()
    with owner.http() as mine, other.http() as theirs, server.admin() as admin:
        ask(mine, chat(base_name, "Hi", secret))
        ask(mine, chat(base_name, "Hi", secret.replace("7741", "7742")))
        assert ask(theirs, chat(base_name, "Hi", secret)) == 0
        assert "tangerine" in mine.get("/v1/cache").text
        assert theirs.get("/v1/cache").json()["account"]["total"]["exact_hits"] == 0
        seen = admin.get("/admin/cache")
        assert "tangerine" not in seen.text + theirs.get("/v1/cache").text.replace(
            "The launch code is tangerine", ""
        )
        namespaces = {n["owner"]["name"]: n for n in seen.json()["namespaces"]}
        assert {owner.slug, other.slug} <= namespaces.keys()
        assert namespaces[owner.slug]["counts"]["misses"]["tokens"] == 1
        assert seen.json()["isolation"]["cross_namespace_hits"] == 0
        assert theirs.get("/admin/cache").status_code == 403


def test_the_operator_invalidates_one_owner(server, owner, base_name) -> None:
    other = server.new_tenant()
    with owner.http() as mine, other.http() as theirs, server.admin() as admin:
        for client in (mine, theirs):
            ask(client, chat(base_name, "Hi"))
        body = {"owner": {"kind": "tenant", "name": owner.slug}}
        done = admin.post("/admin/cache/invalidate", json=body)
        assert done.status_code == 200 and done.json()["blocks_freed"] > 0
        assert ask(mine, chat(base_name, "Hi")) == 0
        assert ask(theirs, chat(base_name, "Hi")) > 0
        body = {"owner": {"kind": "tenant", "name": "nobody"}}
        assert admin.post("/admin/cache/invalidate", json=body).status_code == 404
        report = mine.get("/v1/cache").json()["account"]
        assert report["total"]["invalidations"]["operator"] > 0
        assert report["invalidations"][0]["cause"] == "operator"
        assert report["total"]["misses"]["invalidated"] == 1


def test_a_disabled_tenant_leaves_nothing_cached(server, owner, base_name) -> None:
    with owner.http() as mine, server.admin() as admin:
        ask(mine, chat(base_name, "Hi"))
        admin.patch(f"/admin/tenants/{owner.slug}", json={"state": "disabled"}).raise_for_status()
        seen = admin.get("/admin/cache").json()["namespaces"]
        (own,) = [n for n in seen if n["owner"]["name"] == owner.slug]
        assert own["counts"]["cached_blocks"] == 0
        assert own["counts"]["invalidations"]["tenant_purged"] > 0


def test_a_retired_revision_leaves_nothing_cached(server, owner, make_adapter) -> None:
    assert owner.push("bot", make_adapter(7)).status_code == 201
    with owner.http() as mine, server.admin() as admin:
        ask(mine, chat("bot", "Hi"))
        assert ask(mine, chat("bot", "Hi")) > 0
        assert mine.delete("/v1/adapters/bot/revisions/1").status_code == 200
        seen = admin.get("/admin/cache").json()
        own = [n for n in seen["namespaces"] if n["owner"]["name"] == owner.slug]
        assert [n["counts"]["cached_blocks"] for n in own if n["adapter_digest"]] == [0]
        assert any(i["cause"] == "revision_retired" for i in seen["invalidations"])


def test_metrics_carry_no_text_of_clients(owner, base_name) -> None:
    with owner.http() as mine:
        ask(mine, chat(base_name, "Hi", cache_salt="a-salt-of-mine"))
        ask(mine, chat(base_name, "Hi", cache_salt="a-salt-of-mine"))
        text = mine.get("/metrics").text
    hits = [x for x in text.splitlines() if x.startswith("polyloom_prefix_requests_hit")]
    assert any(owner.slug in x for x in hits)
    assert "a-salt-of-mine" not in text
