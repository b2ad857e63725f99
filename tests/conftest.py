"""Bases that tests of several packages share: a tiny random Llama, and the real SmolLM2."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from polyloom.kvcache.kernels.cuda import stand_in
from polyloom.platform.engine.model.store import BaseModel, pull
from tests.cuda_emulator.backend import EmulatedDevice

# The same examples every time, however slow the machine is.
settings.register_profile("polyloom", deadline=None, derandomize=True)
settings.load_profile("polyloom")

VOCABULARY = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog while the engine serves many tenants.",
    "Please open a ticket: my invoice is wrong and the payment failed twice this month.",
    "SELECT name, total FROM orders WHERE total > 100 ORDER BY total DESC LIMIT 5;",
    "A revision is immutable, numbered and identified by the digest of its content.",
    "Grüße aus München: naïve café, 你好世界, здравствуй мир, 🙂 and other characters.",
    '{"category": "billing", "priority": "high", "summary": "charged twice"}',
]


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    """Tests share small machines; more threads than this only fight."""
    torch.set_num_threads(min(2, torch.get_num_threads()))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 512 entries: it can encode and decode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in Hugging Face format, fp32: 3 layers, hidden 64, 4 heads, 2 KV heads,
    vocabulary 512, untied head, with a tokenizer, a chat template and eos `<|im_end|>` (id 2).

    Shared by the whole run: never write into it.
    """
    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> BaseModel:
    """SmolLM2-135M-Instruct, fetched and converted once a machine.

    `POLYLOOM_TEST_BASE` names another folder, `.gguf` file or hub id of it to use instead.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    reference = os.environ.get("POLYLOOM_TEST_BASE", "smollm2-135m-instruct")
    return pull(reference, cache / "polyloom" / "test-base")


@pytest.fixture(scope="session")
def emulated_device() -> Iterator[EmulatedDevice]:
    """CUDA kernels run on CPU tensors, from their own text."""
    device = EmulatedDevice()
    with stand_in("cpu", device):
        yield device
