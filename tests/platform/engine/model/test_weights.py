"""Fusing checkpoints: rows land where the layout says, and nothing is missed or left over."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, PretrainedConfig

from polyloom.adapters.base_layout import ModuleGroup
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.kernels.ops import ReferenceOps
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.model.errors import CheckpointError
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.layout import base_layout, tensor_path
from polyloom.platform.engine.model.weights import FusedWeights

CONFIG = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small Llama with biases in one safetensors file that a test may change."""
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**CONFIG, attention_bias=True)).save_pretrained(tmp_path)
    return tmp_path


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}


def save(folder: Path, changed: dict[str, torch.Tensor]) -> None:
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = read_config(folder)
    return Decoder(config, FusedWeights(folder, config, dtype), ReferenceOps(Capabilities()), dtype)


def test_fused_rows_are_the_checkpoints(llama: Path) -> None:
    config, stored = read_config(llama), tensors(llama)
    weights = FusedWeights(llama, config, torch.bfloat16)
    for module in base_layout(config, name="tiny", digest="sha256:0").modules:
        layer = 0 if module.group is ModuleGroup.HEAD else 1
        fused = weights.linear(module.group, layer)
        rows = slice(module.offset, module.offset + module.out_features)
        path = tensor_path(module, layer)
        assert torch.equal(fused.weight[rows], stored[f"{path}.weight"].bfloat16())
        assert (fused.bias is not None) == module.has_bias
        if fused.bias is not None:
            assert torch.equal(fused.bias[rows], stored[f"{path}.bias"].bfloat16())


def test_rows_are_unrounded_and_may_span_modules(llama: Path) -> None:
    config, stored = read_config(llama), tensors(llama)
    weights = FusedWeights(llama, config, torch.bfloat16)
    prefix = "model.layers.1.self_attn"
    q, k = stored[f"{prefix}.q_proj.weight"], stored[f"{prefix}.k_proj.weight"]
    rows = weights.rows(ModuleGroup.QKV, 1, 13, 6)
    assert rows.dtype is torch.float32
    assert torch.equal(rows, torch.cat([q[13:], k[:3]]))
    with pytest.raises(IndexError, match="the group ends"):
        weights.rows(ModuleGroup.QKV, 1, 30, 3)


def test_rows_of_a_fused_checkpoint(
    save_random_model: Callable[[PretrainedConfig], Path],
) -> None:
    folder = save_random_model(Phi3Config(**CONFIG, eos_token_id=1, bos_token_id=2))
    stored = load_file(folder / "model.safetensors")["model.layers.0.mlp.gate_up_proj.weight"]
    weights = FusedWeights(folder, read_config(folder), torch.float32)
    assert torch.equal(weights.rows(ModuleGroup.GATE_UP, 0, 24, 24), stored[24:])


def test_rows_from_several_threads(llama: Path) -> None:
    config = read_config(llama)
    weights = FusedWeights(llama, config, torch.float32)
    expected = weights.rows(ModuleGroup.DOWN, 0, 0, 16)
    with ThreadPoolExecutor(4) as threads:
        rows = threads.map(lambda _: weights.rows(ModuleGroup.DOWN, 0, 0, 16), range(64))
        assert all(torch.equal(row, expected) for row in rows)


def test_a_missing_tensor_is_named(llama: Path) -> None:
    stored = tensors(llama)
    del stored["model.layers.1.mlp.up_proj.weight"]
    save(llama, stored)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight.*missing"):
        decoder(llama)


def test_a_tensor_without_a_place_is_named(llama: Path) -> None:
    save(llama, {**tensors(llama), "model.layers.0.self_attn.q_norm.weight": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_norm\.weight"):
        decoder(llama)


def test_a_layer_beyond_the_config_is_named(llama: Path) -> None:
    stored = tensors(llama)
    stored["model.layers.2.input_layernorm.weight"] = torch.ones(16)
    save(llama, stored)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.input_layernorm"):
        decoder(llama)


def test_stored_frequencies_of_old_exports_are_passed_over(llama: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save(llama, {**tensors(llama), name: torch.ones(2)})
    decoder(llama)


def test_a_misshapen_tensor_is_named(llama: Path) -> None:
    save(llama, {**tensors(llama), "model.norm.weight": torch.ones(17)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\(17,\).*\(16,\)"):
        decoder(llama)


def test_a_quantized_tensor_is_named(llama: Path) -> None:
    stored = tensors(llama)
    name = "model.layers.0.mlp.down_proj.weight"
    save(llama, {**stored, name: stored[name].to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=r"down_proj\.weight: dtype torch\.float8"):
        decoder(llama)


def test_sharded_and_single_files_load_alike(
    llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shards = tmp_path_factory.mktemp("sharded")
    LlamaForCausalLM.from_pretrained(llama).save_pretrained(shards, max_shard_size="4KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    one, many = decoder(llama), decoder(shards)
    assert torch.equal(one._layers[1].gate_up.data, many._layers[1].gate_up.data)

    missing = min(shards.glob("*.safetensors"))
    missing.unlink()
    with pytest.raises(CheckpointError, match=missing.name):
        decoder(shards)


def test_an_index_may_not_leave_its_folder(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        decoder(llama)


def test_pickled_weights_are_not_loaded(llama: Path) -> None:
    torch.save(tensors(llama), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="only safetensors"):
        decoder(llama)


def test_a_truncated_file_is_named(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: unreadable"):
        decoder(llama)


def test_a_tied_head_must_agree_with_the_embedding(tmp_path: Path) -> None:
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=True)).save_pretrained(tmp_path)
    stored = tensors(tmp_path)
    assert "lm_head.weight" not in stored
    tied = decoder(tmp_path)
    assert tied._head is tied._embedding

    embedding = stored["model.embed_tokens.weight"]
    save(tmp_path, {**stored, "lm_head.weight": embedding.clone()})
    decoder(tmp_path)

    save(tmp_path, {**stored, "lm_head.weight": embedding + 1})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*ties them"):
        decoder(tmp_path)
