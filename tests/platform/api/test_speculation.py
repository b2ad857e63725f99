"""Speculation over HTTP: usage, the operator's report, and what a request may ask for."""

import re
import time

import pytest

DRAFTED_LOOPS = re.compile(r'polyloom_speculation_tokens_total{outcome="accepted".*domain="loops"')
REPEATED = "one two three four five six seven eight nine ten. " * 4


def complete(client, model, **more):
    body = {"model": model, "prompt": REPEATED, "max_tokens": 60, "temperature": 0, "seed": 1}
    return client.post("/v1/completions", json=body | more)


@pytest.fixture
def owner(server):
    return server.new_tenant()


def test_no_text_depends_on_drafts_and_usage_counts_them(server, owner, base_name):
    """The tiny model falls into a loop, which n-gram drafts follow."""
    with owner.http() as client:
        plain = complete(client, base_name, drafts="off").json()
        domain = {"metadata": {"domain": "loops"}}
        answers = [
            complete(client, base_name, drafts=drafts, **domain).json()
            for drafts in ("adaptive", "latency", 4)
        ]
    assert {answer["choices"][0]["text"] for answer in answers} == {plain["choices"][0]["text"]}
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {60}
    zero = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert plain["usage"]["completion_tokens_details"] == zero
    accepted = [a["usage"]["completion_tokens_details"] for a in answers]
    accepted = [details["accepted_prediction_tokens"] for details in accepted]
    assert accepted[-1] > 10
    with server.admin() as admin:
        report = admin.get("/admin/speculation").json()
        scraped = admin.get("/metrics").text
    assert report["engines"][0]["drafters"][0] == "ngram"
    [line] = [
        entry
        for entry in report["data"]
        if (entry["line"]["domain"], entry["line"]["drafter"]) == ("loops", "ngram")
    ]
    assert line["line"]["accepted"] == sum(accepted)
    assert line["line"]["revision"] is None and line["line"]["temperature"] == "greedy"
    assert 1 < line["acceptance_length"] <= 1 + line["acceptance_rate"] * 31
    assert 0 < line["acceptance_by_position"][0] <= 1
    assert "polyloom_drafts_tokens_total" in scraped
    with server.admin() as admin:  # the engine is looked at every two seconds
        deadline = time.monotonic() + 20
        while not DRAFTED_LOOPS.search(admin.get("/metrics").text):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_a_route_has_a_profile_that_a_request_may_replace(owner, base_name):
    """What was accepted is kept with the tenant's usage, written off the request's path."""
    with owner.http() as client:

        def accepted(model, **more):
            usage = complete(client, model, **more).json()["usage"]
            return usage["completion_tokens_details"]["accepted_prediction_tokens"]

        route = {"targets": [{"model": base_name}], "drafts": 4}
        assert client.put("/v1/routes/fast", json=route).json()["drafts"] == 4
        drafted = accepted("fast")
        assert drafted > 10
        assert accepted("fast", drafts="off") == 0
        client.put("/v1/routes/fast", json=route | {"drafts": "off"})
        assert accepted("fast") == 0
        deadline = time.monotonic() + 20
        while (totals := client.get("/v1/usage").json()["data"]) == [] or totals[0]["requests"] < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert totals[0]["accepted_draft_tokens"] == drafted


@pytest.mark.parametrize("drafts", [-1, 32, "sometimes", 1.5])
def test_another_draft_policy_is_refused_by_name(owner, base_name, drafts):
    with owner.http() as client:
        answer = complete(client, base_name, drafts=drafts)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "drafts"


def test_the_report_is_the_operators(owner):
    with owner.http() as client:
        assert client.get("/admin/speculation").status_code == 403
