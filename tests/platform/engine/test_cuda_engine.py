"""The whole engine with the CUDA op set, its kernels run from their own text on the CPU."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from polyloom.adapters.source import AdapterSource
from polyloom.adapters.validation import ValidationLimits, validate
from polyloom.platform.engine.errors import EngineStartError
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.layout import base_layout
from polyloom.platform.engine.model.weights import FusedWeights
from polyloom.routing.request import CacheOwner, CacheScope
from tests.cuda_emulator.backend import EmulatedDevice

STEPS = 1000
EIGHT_BITS = 0.05  # largest difference of a logprob
VOCABULARY = 96
ADAPTERS = ((4, "all-linear"), (12, ("q_proj", "v_proj")), (3, ("down_proj",)))


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory) -> Path:
    """Two layers, two query heads to a KV head: as little as has everything."""
    folder = tmp_path_factory.mktemp("small-llama")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sources(small_folder: Path, tmp_path_factory) -> list[AdapterSource | None]:
    config = read_config(small_folder)
    layout = base_layout(config, name=small_folder.name, digest="sha256:tiny")
    base = FusedWeights(small_folder, config, torch.float32)
    made: list[AdapterSource | None] = [None]
    for seed, (rank, modules) in enumerate(ADAPTERS):
        model = LlamaForCausalLM.from_pretrained(small_folder, dtype=torch.float32)
        adapted = get_peft_model(model, LoraConfig(r=rank, target_modules=modules))
        torch.manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        folder = tmp_path_factory.mktemp("adapter")
        adapted.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        limits = ValidationLimits(max_rank=64)
        made.append(AdapterSource(validate(folder, layout, base, limits).digest, str(folder)))
    return made


def mixed_requests(request_factory, sources, count: int):
    """Short and long prompts, repeats that invite drafts, all parameters of sampling."""
    rng, made = np.random.default_rng(0), []
    for number in range(count):
        length = int(rng.choice([2, 9, 25]))
        prompt = tuple(int(t) for t in rng.integers(3, VOCABULARY, length))
        if number % 3 == 0:
            prompt = (prompt[:5] * 9)[:length]
        made.append(
            request_factory(
                prompt,
                adapter=sources[rng.integers(len(sources))],
                max_tokens=int(rng.integers(1, 60)),
                seed=number,
                temperature=float(rng.choice([0.0, 0.8])),
                top_p=float(rng.choice([1.0, 0.9])),
                repetition_penalty=float(rng.choice([1.0, 1.2])),
                logprobs=0 if number % 2 else None,
            )
        )
    return made


def test_a_device_that_is_not_there_is_refused(engine_factory, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineStartError, match="torch sees no such device"):
        engine_factory(implementation="auto", device="cuda")


@pytest.mark.parametrize("implementation", ["reference", "auto"])
def test_only_cuda_kernels_keep_a_cache_of_eight_bits(engine_factory, implementation: str) -> None:
    with pytest.raises(EngineStartError, match="kv_dtype: a cache of 8 bits needs the CUDA"):
        engine_factory(implementation=implementation, kv_dtype="int8")


def teacher_forced(answers) -> list[float]:
    return [one.logprob for answer in answers for one in answer.prompt_logprobs if one.logprob]


def test_a_cache_of_eight_bits_stays_near(
    emulated_device: EmulatedDevice, engine_factory, request_factory, run
) -> None:
    """Logprobs of given texts, in chunks over the cache; twice the tokens fit, and blocks that are
    shared or copied take their scales along."""
    rng = np.random.default_rng(0)
    texts = [tuple(int(t) for t in rng.integers(3, 512, 90)) for _ in range(4)]
    scored = [
        request_factory(text, max_tokens=0, prompt_logprobs=0, logprobs=None) for text in texts
    ]
    plain, narrow = (
        engine_factory(implementation="cuda", kv_dtype=kept, token_budget=16, itl_target=60.0)
        for kept in ("auto", "int8")
    )
    expected, actual = (teacher_forced(run(engine, scored)) for engine in (plain, narrow))
    assert len(actual) == 4 * 89
    assert np.abs(np.subtract(actual, expected)).max() <= EIGHT_BITS
    assert narrow.status().blocks_total > 3 * plain.status().blocks_total
    used = {one.name: one for one in narrow.capabilities()}["paged_attention"]
    assert "in 8 bits" in used.why and "attend<float,signed char,4,1>" in used.kernels
    scope = CacheScope(owner=CacheOwner("tenant", "mine"), tokenizer_digest="sha256:tokenizer")
    warm = [
        request_factory((*texts[0][:kept], 5), max_tokens=6, cache=scope) for kept in (70, 70, 56)
    ]
    first, second, third = (run(narrow, [one])[0] for one in warm)
    assert first.token_ids == second.token_ids
    assert third.end.cached_tokens == 56  # three blocks, and half of a copied one
    assert (
        third.token_ids == run(narrow, [msgspec.structs.replace(warm[2], cache=None)])[0].token_ids
    )


def test_long_segments_go_to_tensor_cores_and_say_so(
    emulated_device: EmulatedDevice, engine_factory, request_factory, run, adapter_factory
) -> None:
    source = adapter_factory(12, 1)
    prompts = [tuple(range(3, 3 + length)) for length in (80, 20)]
    answers, listed = [], {}
    for implementation in ("reference", "cuda"):
        engine = engine_factory(implementation=implementation, token_budget=128, itl_target=60.0)
        requests = [request_factory(prompt, adapter=source, max_tokens=4) for prompt in prompts]
        answers.append([run(engine, [request])[0].token_ids for request in requests])
        listed = {one.name: one for one in engine.capabilities()}
    assert answers[0] == answers[1]
    tiles, kernels = listed["lora_tiles"], listed["lora"]
    assert (tiles.implementation, tiles.engaged) == ("torch", 3 * 4)  # layers, groups
    assert "64 tokens and more, on tensor cores" in tiles.why
    assert kernels.kernels == ("lora_shrink<float>", "lora_expand<float>")
    assert all(one.why for one in listed.values() if one.implementation == "cuda")


def options(folder: Path) -> dict[str, object]:
    block = 2 * 2 * 1 * 16 * 16 * 4
    return {
        "model_folder": str(folder),
        "kv_memory": block * 7,
        "token_budget": 24,
        "max_running": 3,
        "itl_target": 60.0,
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_mixed_steps_equal_the_reference(
    emulated_device: EmulatedDevice, small_folder, sources, engine_factory, request_factory, run
) -> None:
    """Adapters join and leave, prompts are chunked, sequences preempted, drafts verified."""
    chosen = options(small_folder)
    engines = [engine_factory(implementation=i, **chosen) for i in ("reference", "cuda")]
    waiting = mixed_requests(request_factory, sources, 500)
    preemptions = 0
    while engines[1].status().steps < STEPS:
        requests, waiting = waiting[:50], waiting[50:]
        plain, fast = (run(engine, requests) for engine in engines)
        for expected, actual in zip(plain, fast, strict=True):
            assert actual.token_ids == expected.token_ids
            assert [one.logprob for one in actual.logprobs] == pytest.approx(
                [one.logprob for one in expected.logprobs], abs=1e-4
            )
        preemptions += sum(answer.end.timings.preemptions for answer in fast)
        for engine in engines:
            engine.retire(sources[1].digest)
    assert preemptions > 0
    used = {one.name: one for one in engines[1].capabilities()}
    assert used["paged_attention"].engaged > 2 * STEPS and used["lora"].engaged > STEPS
    assert used["prefill_attention"].engaged > 0 and used["sampling"].engaged > 0
    assert set(used.pop("sampling").fallbacks) == {"logprobs are asked for"}
    assert not any(one.fallbacks for one in used.values())
