"""Completions and chat of a real server, through the official client."""

import time

import openai
import pytest

HELLO = [{"role": "user", "content": "Hello there"}]


def test_the_base_comes_first_and_no_path_is_told(tenant) -> None:
    models = tenant.openai().models.list().data
    assert models[0].owned_by == "polyloom"
    assert all("/" not in m.id for m in models)


def test_a_stream_is_the_answer_in_pieces(tenant, base_name) -> None:
    client = tenant.openai()
    options = {"model": base_name, "messages": HELLO, "max_tokens": 24, "seed": 7, "n": 2}
    whole = client.chat.completions.create(**options)
    texts, reasons, usage = {0: "", 1: ""}, {}, None
    options["stream_options"] = {"include_usage": True}
    for chunk in client.chat.completions.create(**options, stream=True):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == {c.index: c.message.content for c in whole.choices}
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    assert usage is not None
    for counted in ("prompt_tokens", "completion_tokens", "total_tokens"):  # reuse differs, rightly
        assert getattr(usage, counted) == getattr(whole.usage, counted)
    assert texts[0] != texts[1]


def test_a_stop_string_is_not_shown_and_ends_the_choice(tenant, base_name) -> None:
    client = tenant.openai()
    options = {"model": base_name, "prompt": "Hello", "max_tokens": 30, "seed": 3}
    text = client.completions.create(**options).choices[0].text
    stop = text[4:6]
    choice = client.completions.create(**options, stop=stop).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_chat_logprobs(tenant, base_name) -> None:
    answer = tenant.openai().chat.completions.create(
        model=base_name, messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert len(choice.logprobs.content) == answer.usage.completion_tokens == 6
    data = b"".join(bytes(t.bytes) for t in choice.logprobs.content)
    assert data.decode(errors="replace") == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob


def test_echo_scores_the_prompt(tenant, base_name) -> None:
    """How evaluation harnesses read a likelihood: the prompt, and nothing generated."""
    answer = tenant.openai().completions.create(
        model=base_name, prompt="Hello world", max_tokens=0, echo=True, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text == "Hello world"
    assert "".join(choice.logprobs.tokens) == "Hello world"
    assert choice.logprobs.token_logprobs[0] is None
    assert all(p < 0 for p in choice.logprobs.token_logprobs[1:])
    offsets = choice.logprobs.text_offset
    assert [
        choice.text[o:].startswith(t) for o, t in zip(offsets, choice.logprobs.tokens, strict=False)
    ]


def test_prompts_of_every_kind(tenant, base_name) -> None:
    client = tenant.openai()
    options = {"model": base_name, "max_tokens": 4, "temperature": 0}
    one = client.completions.create(prompt="Hello", **options).choices[0].text
    many = client.completions.create(prompt=["Hello", "World"], n=2, **options).choices
    assert [c.index for c in many] == [0, 1, 2, 3]
    assert [c.text for c in many[:2]] == [one, one]
    ids = client.completions.create(prompt=[40, 41, 42], **options).choices[0].text
    lists = client.completions.create(prompt=[[40, 41, 42], [43]], **options).choices
    assert lists[0].text == ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"extra_body": {"regex": "a", "min_tokens": 2}}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tenant, base_name, fields, param) -> None:
    options = {"model": base_name, "messages": HELLO} | fields
    with pytest.raises(openai.BadRequestError) as refused:
        tenant.openai().chat.completions.create(**options)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"), ({"prompt": []}, "prompt")],
)
def test_completions_refuse_too(tenant, base_name, fields, param) -> None:
    options = {"model": base_name, "prompt": "x"} | fields
    with pytest.raises(openai.BadRequestError) as refused:
        tenant.openai().completions.create(**options)
    assert refused.value.param == param


def test_what_clients_send_harmlessly_is_taken(tenant, base_name) -> None:
    tenant.openai().chat.completions.create(
        model=base_name,
        messages=[{"role": "developer", "content": [{"type": "text", "text": "be"}]}, *HELLO],
        max_completion_tokens=2,
        metadata={"a": "b"},
        store=False,
        user="somebody",
        parallel_tool_calls=True,
        service_tier="auto",
        response_format={"type": "text"},
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
    )


@pytest.mark.parametrize("nested", ["[" * 100_000 + "]" * 100_000, '{"a":' * 50_000])
def test_a_body_nested_too_deeply_is_refused(tenant, base_name, nested) -> None:
    body = f'{{"model": "{base_name}", "prompt": "x", "metadata": {nested}}}'
    answer = tenant.http().post("/v1/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


def test_a_name_with_a_nul_names_nothing(tenant) -> None:
    for path in ("a%00", "a%00/aliases/prod", "a/aliases/%00"):
        assert tenant.http().get(f"/v1/adapters/{path}").status_code == 404


def test_too_long_a_context_has_its_own_code(tenant, base_name) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        tenant.openai().completions.create(model=base_name, prompt="word " * 3000)
    assert refused.value.code == "context_length_exceeded"


def test_keys_and_scopes(server, tenant, base_name) -> None:
    assert server.client("pl_wrong").get("/v1/models").status_code == 401
    reader = server.client(server.new_key(tenant.slug, ["adapters:read"]))
    answer = reader.post("/v1/completions", json={"model": base_name, "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
    assert tenant.http().get("/admin/tenants").status_code == 403
    assert server.admin().get("/v1/models").status_code == 403


def test_a_client_that_leaves_frees_its_sequence(server, tenant, base_name) -> None:
    body = {"model": base_name, "prompt": "x", "max_tokens": 900, "stream": True}
    body |= {"ignore_eos": True}
    with tenant.http() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        request_id = answer.headers["x-request-id"]
        assert any(request_id in s for s in sequences(server))
    wait_until(lambda: not any(request_id in s for s in sequences(server)))


def test_a_request_can_be_cancelled_by_its_tenant_alone(server, tenant, base_name) -> None:
    body = {"model": base_name, "prompt": "x", "max_tokens": 900, "stream": True}
    body |= {"ignore_eos": True}
    stranger = server.new_tenant()
    with tenant.http() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        request_id = answer.headers["x-request-id"]
        stranger.http().delete(f"/v1/requests/{request_id}").raise_for_status()
        assert any(request_id in s for s in sequences(server))
        tenant.http().delete(f"/v1/requests/{request_id}").raise_for_status()
        assert '"finish_reason":"cancelled"' in "".join(lines)


def test_limits_answer_429_with_a_time(server, base_name) -> None:
    limited = server.new_tenant(requests_per_minute=1).http()
    body = {"model": base_name, "prompt": "x", "max_tokens": 1}
    assert limited.post("/v1/completions", json=body).status_code == 200
    refused = limited.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
    assert int(refused.headers["retry-after"]) >= 1
    streamed = limited.post("/v1/completions", json=body | {"stream": True})
    assert streamed.status_code == 429


def test_usage_is_recorded_once(server, base_name) -> None:
    tenant = server.new_tenant()
    body = {"model": base_name, "prompt": "x", "max_tokens": 3, "n": 2, "ignore_eos": True}
    tenant.http().post("/v1/completions", json=body).raise_for_status()

    def total():
        data = tenant.http().get("/v1/usage").json()["data"]
        return data[0] if data else None

    wait_until(total)
    assert (total()["requests"], total()["completion_tokens"]) == (1, 6)


def test_what_machines_ask(server, tenant) -> None:
    client = tenant.http()
    assert client.get("/livez").status_code == 200
    assert client.get("/health").json()["status"] == "ok"
    metrics = client.get("/metrics").text
    assert "gen_ai_server_time_to_first_token_seconds_bucket" in metrics
    assert "polyloom_engine_blocks_free" in metrics
    document = client.get("/schema/openapi.json").json()
    assert "ChatRequest" in document["components"]["schemas"]
    assert "/v1/chat/completions" in document["paths"]
    missing = client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert missing.headers["x-request-id"].startswith("req_")


def sequences(server) -> list[str]:
    return server.admin().get("/admin/engine").json()["sequences"]


def wait_until(true, seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.05)
