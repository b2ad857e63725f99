"""Small random transformers models of every family, and the same models run by our decoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from polyloom.adapters.segments import LoraBatch
from polyloom.kvcache.attention import PagedAttention
from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.config import KVCacheConfig
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.kvcache.storage import KVStorage
from polyloom.platform.engine.kernels.cpu import CpuOps
from polyloom.platform.engine.kernels.ops import ReferenceOps
from polyloom.platform.engine.model.config import DecoderConfig
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.model.weights import FusedWeights

BLOCK_SIZE = 4
BLOCKS_PER_SEQUENCE = 16


class NoAdapters:
    """A LoRA hook that must never be reached."""

    def apply(self, *arguments: object) -> None:
        raise AssertionError("a base-only batch reached the adapters")


@dataclass
class PagedRun:
    """Our decoder with a cache for a few sequences; blocks are handed out in scrambled order."""

    decoder: Decoder
    attention: PagedAttention
    sequences: int
    lengths: list[int] = field(default_factory=list)

    def step(self, chunks: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Append each sequence's chunk (maybe empty) and return its `[len(chunk), vocab]` logits."""
        batch, token_ids = self._batch(chunks)
        lora = base_only(len(token_ids))
        hidden = self.decoder.forward(token_ids, batch, lora, self.attention, NoAdapters())
        logits = self.decoder.logits(hidden, lora, NoAdapters())
        return list(logits.split([len(chunk) for chunk in chunks]))

    def _batch(self, chunks: Sequence[Sequence[int]]) -> tuple[AttentionBatch, torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        tables = torch.randperm(self.sequences * BLOCKS_PER_SEQUENCE, generator=generator)
        tables = tables.view(self.sequences, BLOCKS_PER_SEQUENCE)
        starts, positions, slots = [0], [], []
        for s, chunk in enumerate(chunks):
            starts.append(starts[-1] + len(chunk))
            for position in range(self.lengths[s], self.lengths[s] + len(chunk)):
                block = int(tables[s, position // BLOCK_SIZE])
                positions.append(position)
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
            self.lengths[s] += len(chunk)
        batch = AttentionBatch(
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(self.lengths, dtype=torch.int32),
            block_tables=tables.int(),
            slot_mapping=torch.tensor(slots),
            positions=torch.tensor(positions),
        )
        return batch, torch.tensor([token for chunk in chunks for token in chunk])


def base_only(tokens: int) -> LoraBatch:
    """All tokens of a step without an adapter."""
    return LoraBatch(
        starts=torch.tensor([0, tokens], dtype=torch.int32),
        slots=torch.tensor([-1], dtype=torch.int32),
        pages={},
        rows=frozenset(),
    )


def paged_run_of(
    folder: Path,
    config: DecoderConfig,
    sequences: int,
    *,
    dtype: torch.dtype = torch.float32,
    implementation: Literal["reference", "cpu"] = "reference",
) -> PagedRun:
    """Our decoder of a folder, read as `config`."""
    capabilities = Capabilities()
    ops = {"reference": ReferenceOps, "cpu": CpuOps}[implementation](capabilities)
    weights = FusedWeights(folder, config, dtype)
    cache = KVCacheConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        num_blocks=sequences * BLOCKS_PER_SEQUENCE,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    storage = KVStorage(cache)
    attention = PagedAttention(cache, storage, config.num_heads, implementation, capabilities)
    decoder = Decoder(config, weights, ops, dtype)
    return PagedRun(decoder, attention, sequences, [0] * sequences)


@pytest.fixture(scope="session")
def paged_run() -> Callable[..., PagedRun]:
    """`paged_run_of`, for test modules."""
    return paged_run_of


@pytest.fixture(scope="session")
def save_random_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[PretrainedConfig], Path]:
    """Save a random fp32 model of a config; norms and biases are random too, never ones or zeros."""

    def save(config: PretrainedConfig) -> Path:
        folder = tmp_path_factory.mktemp(config.model_type)
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
        model.float().save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def reference_logits() -> Callable[[Path, Sequence[Sequence[int]]], list[torch.Tensor]]:
    """transformers' own `[tokens, vocab]` fp32 logits of each sequence alone."""

    @torch.no_grad()
    def run(folder: Path, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        return [model(torch.tensor([list(ids)])).logits[0] for ids in sequences]

    return run
