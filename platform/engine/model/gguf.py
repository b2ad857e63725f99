"""A GGUF file becomes a Hugging Face folder of bf16 safetensors, once.

transformers reads weights, config and vocabulary. What it would drop without a word is mended here
(how some vocabularies split numbers) or refused (RoPE scaling, unknown ways to split text).
"""

import io
from contextlib import redirect_stderr
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from polyloom.platform.engine.model.errors import BaseFetchError

ROPE_FACTORS_TENSOR = "rope_freqs.weight"
PLAIN_SPLITS = frozenset({"gpt-2", "gpt2"})
SINGLE_DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""llama.cpp's names of byte-level vocabularies that isolate every digit before GPT-2's split."""


def convert_gguf(file: Path, target: Path) -> None:
    """Dequantise `file` into the folder `target`: weights, config, tokenizer and chat template.

    Weights are rounded to bf16. Takes about 20 s for 135M parameters and the memory of the
    dequantised model. Raises BaseFetchError if the file cannot be converted faithfully.
    """
    metadata = _read_metadata(file)
    split = _split_kind(file, metadata)
    try:
        # The caller reports progress; transformers' bars would tear it.
        with redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
                local_files_only=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(
                file.parent, gguf_file=file.name, local_files_only=True
            )
            if split in SINGLE_DIGIT_SPLITS:
                _isolate_digits(tokenizer)
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except (ValueError, KeyError, OSError, NotImplementedError, RuntimeError) as error:
        raise BaseFetchError(file.name, f"not convertible: {error}") from error


def _read_metadata(file: Path) -> dict[str, object]:
    """The file's scalar fields; refuses RoPE scaling, which transformers does not read."""
    try:
        reader = GGUFReader(file)
    except (ValueError, OSError, IndexError) as error:
        raise BaseFetchError(file.name, f"not a readable GGUF file: {error}") from error
    metadata = {
        name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1
    }
    for name, value in metadata.items():
        if name.endswith(".rope.scaling.type") and value != "none":
            raise BaseFetchError(file.name, f"{name} = {value!r} cannot be converted")
    if any(tensor.name == ROPE_FACTORS_TENSOR for tensor in reader.tensors):
        raise BaseFetchError(file.name, f"tensor {ROPE_FACTORS_TENSOR} cannot be converted")
    return metadata


def _split_kind(file: Path, metadata: dict[str, object]) -> str | None:
    """How a byte-level vocabulary splits text before merging; None for other vocabularies."""
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return None
    split = str(metadata.get("tokenizer.ggml.pre"))
    if split not in PLAIN_SPLITS | SINGLE_DIGIT_SPLITS | GGUF_PRE_TOKENIZER_SPLITS.keys():
        raise BaseFetchError(file.name, f"tokenizer.ggml.pre = {split!r} cannot be converted")
    return split


def _isolate_digits(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
