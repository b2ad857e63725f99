"""Random draft heads of a tiny base, written as uploads would bring them."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from polyloom.adapters.base_layout import BaseLayout
from polyloom.adapters.draft_heads.checkpoint import (
    DraftHead,
    expected_shapes,
    save_draft_head,
    vocabulary_tensors,
)
from polyloom.adapters.draft_heads.config import (
    DraftHeadConfig,
    ProposalMethod,
    SpeculatorsConfig,
    Verifier,
)

BASE_DIGEST = "sha256:" + "b" * 64
ADAPTER_DIGEST = "sha256:" + "a" * 64
SHARED_IDS = [2, 3, 5, 8, 13, 21, 34]


@pytest.fixture
def layout() -> BaseLayout:
    return BaseLayout(
        name="tiny",
        digest=BASE_DIGEST,
        architecture="TinyForCausalLM",
        model_type="tiny",
        num_layers=1,
        hidden_size=8,
        vocab_size=40,
        tied_head=False,
        layer_prefix="model.layers",
        groups=(),
        modules=(),
    )


def shared_config() -> DraftHeadConfig:
    verifier = Verifier("tiny", ("TinyForCausalLM",), BASE_DIGEST)
    return DraftHeadConfig(
        speculators_config=SpeculatorsConfig(verifier, (ProposalMethod(3),)),
        hidden_size=8,
        intermediate_size=12,
        vocab_size=40,
        draft_vocab_size=len(SHARED_IDS),
        adapter_vocab_size=4,
        rms_norm_eps=1e-5,
    )


def random_tensors(config: DraftHeadConfig, ids: list[int], seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=random)
        for name, shape in expected_shapes(config).items()
        if name not in ("d2t", "t2d")
    }
    return tensors | vocabulary_tensors(torch.tensor(ids), config.vocab_size)


@pytest.fixture
def shared(tmp_path: Path) -> DraftHead:
    config = shared_config()
    return save_draft_head(tmp_path / "shared", config, random_tensors(config, SHARED_IDS, 0))


@pytest.fixture
def delta_config(shared: DraftHead) -> Callable[..., DraftHeadConfig]:
    """The config of an adapter's head with two tokens of its own, changed as a test wants."""

    def make(**changes: object) -> DraftHeadConfig:
        delta = {
            "draft_vocab_size": len(SHARED_IDS) + 2,
            "adapter_digest": ADAPTER_DIGEST,
            "shared_head_digest": shared.digest,
            "rank": 3,
        }
        return msgspec.structs.replace(shared.config, **(delta | changes))

    return make
