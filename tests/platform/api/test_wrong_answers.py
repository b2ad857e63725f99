"""Answers with weights that nobody asked for: what must never happen, through a whole server."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PROMPT = "The quick brown fox jumps over the lazy dog, and then over the lazy dog again"

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def ask(tenant, model: str):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    return tenant.http().post("/v1/completions", json=body | {"logprobs": 1, "ignore_eos": True})


def answer(tenant, model: str) -> tuple[str, list[float]]:
    """The text and its tokens' logprobs, which show a change too small to change the text."""
    choice = ask(tenant, model).raise_for_status().json()["choices"][0]
    return choice["text"], [round(p, 4) for p in choice["logprobs"]["token_logprobs"]]


def changed(folder: Path, target: Path, change: Change) -> Path:
    """A copy of the adapter with other tensors."""
    shutil.copytree(folder, target)
    file = target / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    return target


def test_an_adapter_that_nobody_asked_for_is_not_applied(server, base_name, make_adapter) -> None:
    tenant = server.new_tenant()
    before = answer(tenant, base_name)
    tenant.push("support", make_adapter(1))
    assert answer(tenant, "support") != before
    assert answer(tenant, base_name) == before


def test_one_prompt_is_read_anew_for_each_adapter(server, base_name, make_adapter) -> None:
    """KV made under one adapter is another's wrong answer, and the base's."""
    tenant = server.new_tenant()
    for number in (1, 2):
        tenant.push(f"a{number}", make_adapter(number))
    models = ["a1", "a2", base_name]
    first = [answer(tenant, model) for model in models]
    assert len({text for text, _ in first}) == 3
    for model, expected in zip(reversed(models), reversed(first), strict=True):
        assert answer(tenant, model) == expected


def test_an_adapter_none_of_whose_tensors_match_is_refused(server, make_adapter, tmp_path) -> None:
    tenant = server.new_tenant()
    folder = changed(
        make_adapter(1),
        tmp_path / "stranger",
        lambda tensors: {name.replace(".layers.", ".h."): t for name, t in tensors.items()},
    )
    refused = tenant.push("stranger", folder)
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == "invalid_adapter"
    assert ask(tenant, "stranger").status_code == 404


def test_a_failed_revision_answers_nothing(server, make_adapter, tmp_path) -> None:
    """Finite weights whose products are not: nothing to compare with PEFT, so no verdict."""
    tenant = server.new_tenant()
    folder = changed(
        make_adapter(1),
        tmp_path / "wild",
        lambda tensors: {name: tensor * 1e30 for name, tensor in tensors.items()},
    )
    failed = tenant.push("wild", folder)
    assert (failed.status_code, failed.json()["error"]["code"]) == (422, "fidelity_failed")
    for model in ("wild", "wild@1", "wild@prod"):
        assert ask(tenant, model).status_code == 404, model
