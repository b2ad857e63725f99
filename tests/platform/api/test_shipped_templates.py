"""A chat template that a tenant ships, through the real server: its own, and its own risk."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

HANGING = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2


def with_template(folder: Path, parent: Path, template: str) -> Path:
    copy = parent / "adapter"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text(template)
    return copy


def chat(tenant, model: str) -> httpx.Response:
    messages = [{"role": "user", "content": "Hi"}]
    with tenant.http() as client:
        return client.post(
            "/v1/chat/completions",
            json={"model": model, "messages": messages, "max_tokens": 1},
        )


def test_a_hanging_template_fails_its_own_requests_alone(
    server, make_adapter, base_name, tmp_path: Path
) -> None:
    tenant, other = server.new_tenant(), server.new_tenant()
    pushed = tenant.push("loop", with_template(make_adapter(1), tmp_path / "a", HANGING))
    assert pushed.is_success, pushed.text
    good = "{{ messages[0].content }}"
    assert other.push("own", with_template(make_adapter(1), tmp_path / "b", good)).is_success
    with ThreadPoolExecutor() as pool:
        hanging = pool.submit(chat, tenant, "loop")
        assert chat(other, base_name).status_code == 200
        assert not hanging.done()
        assert chat(other, "own").json()["usage"]["prompt_tokens"] < 5
        answer = hanging.result()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "messages")
    assert error["message"] == "the chat template takes longer than 2 s"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 7 ** (10 ** 8) % 3 }}", "takes longer than 2 s"),
        ("{{ messages | no_such_filter }}", "No filter named"),
    ],
)
def test_an_upload_that_cannot_be_compiled(
    server, make_adapter, tmp_path: Path, template: str, said: str
) -> None:
    tenant = server.new_tenant()
    refused = tenant.push("bad", with_template(make_adapter(1), tmp_path, template))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (422, "invalid_adapter")
    assert said in error["message"]
    with tenant.http() as client:
        assert client.get("/v1/adapters").json()["data"] == []
