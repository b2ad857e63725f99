"""Real conversions of a tiny GGUF: the same logits and tokens, or a refusal that names the field."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyloom.platform.engine.model.errors import BaseFetchError
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.gguf import convert_gguf

HEADS = {"q_proj": 4, "k_proj": 2}


def permuted(name: str, weight: np.ndarray) -> np.ndarray:
    """llama.cpp's order of a rotary projection's rows: pairs side by side, not halves."""
    heads = next((n for part, n in HEADS.items() if part in name), None)
    if heads is None:
        return weight
    pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path,
    file: Path,
    *,
    pre: str = "smollm",
    rope_scaling: str | None = None,
    extra_tensors: Sequence[str] = (),
) -> None:
    """The tiny Llama of `folder` as llama.cpp's converter writes it, in fp32."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if rope_scaling is not None:
        writer.add_string("llama.rope.scaling.type", rope_scaling)

    vocabulary = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3 if i in special else 1 for i in range(len(vocabulary))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        renamed = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(renamed, permuted(name, tensor.float().numpy()))
    for name in extra_tensors:
        writer.add_tensor(name, np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_converted_folder_is_the_model(
    tiny_llama_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tiny_llama_folder, tmp_path / "tiny.gguf")
    capfd.readouterr()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted")
    assert capfd.readouterr().err == "", "progress bars reached the terminal"

    ours, theirs = read_config(tmp_path / "converted"), read_config(tiny_llama_folder)
    assert replace(ours, norm_eps=theirs.norm_eps) == theirs
    assert ours.norm_eps == pytest.approx(theirs.norm_eps), "GGUF stores it in fp32"
    original = AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.bfloat16)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert converted.dtype is torch.bfloat16
    tokens = torch.tensor([[5, 60, 200, 300, 7]])
    with torch.no_grad():
        torch.testing.assert_close(converted(tokens).logits, original(tokens).logits)

    before = AutoTokenizer.from_pretrained(tiny_llama_folder)
    after = AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert after.eos_token_id == 2
    assert after.chat_template == before.chat_template
    text = "<|im_start|>user\nPlease open a ticket: Grüße 🙂<|im_end|>"
    assert after(text).input_ids == before(text).input_ids


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["a", "ĠĠ", "1", "2"]),
        ("gpt-2", ["a", "Ġ", "Ġ12"]),
        ("qwen2", ["a", "Ġ", "Ġ", "1", "2"]),
    ],
)
def test_text_is_split_as_the_vocabulary_expects(
    pre: str, pieces: list[str], tiny_llama_folder: Path, tmp_path: Path
) -> None:
    write_gguf(tiny_llama_folder, tmp_path / "tiny.gguf", pre=pre)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "converted")
    splits = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in splits] == pieces


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rope_scaling": "yarn"}, r"rope\.scaling\.type"),
        ({"extra_tensors": ("rope_freqs.weight",)}, r"rope_freqs\.weight"),
        ({"pre": "chatglm-bpe"}, r"tokenizer\.ggml\.pre = 'chatglm-bpe'"),
    ],
)
def test_what_would_be_dropped_is_refused(
    options: dict[str, object], named: str, tiny_llama_folder: Path, tmp_path: Path
) -> None:
    write_gguf(tiny_llama_folder, tmp_path / "tiny.gguf", **options)
    with pytest.raises(BaseFetchError, match=named):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_other_bytes_are_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"not a model at all" * 10)
    with pytest.raises(BaseFetchError, match=r"no\.gguf"):
        convert_gguf(tmp_path / "no.gguf", tmp_path / "converted")
