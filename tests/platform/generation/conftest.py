"""Tokenizers of the two kinds there are: byte-level, and pieces with byte fallback."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from polyloom.platform.generation.tokenizers import TextTokenizer

PIECES = ["<unk>", "<s>", "</s>", "▁", "▁hello", "▁world", "he", "llo", "!", "é", "▁x", "STOP"]


@pytest.fixture(scope="session")
def byte_level(tiny_llama_folder: Path) -> TextTokenizer:
    return TextTokenizer(tiny_llama_folder)


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Llama 2's kind: `▁` for spaces, `<0xNN>` for what no piece covers."""
    pieces = PIECES + [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    folder = tmp_path_factory.mktemp("byte-fallback")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return TextTokenizer(folder)
