"""The shipped draft heads fit each other, the shipped adapters and the base, and passed their gate."""

from pathlib import Path

import pytest
import torch

from polyloom.adapters.draft_heads.checkpoint import read_draft_head
from polyloom.adapters.draft_heads.validation import validate_draft_head
from polyloom.adapters.validation import load_adapter_weights
from polyloom.platform.engine.model.layout import base_layout
from polyloom.platform.engine.model.store import BaseModel
from polyloom.platform.engine.model.weights import FusedWeights

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARED = "smollm2-135m-instruct"
HEADS = sorted(folder.name for folder in (EXAMPLES / "draft_heads").iterdir())
MEGABYTE = 1_000_000


@pytest.mark.parametrize("name", HEADS)
def test_a_shipped_head_is_small_and_worth_having(name: str) -> None:
    folder = EXAMPLES / "draft_heads" / name
    training = read_draft_head(folder).config.training
    assert training is not None and training.gate is not None and training.gate.passed
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size < (6 if name == SHARED else 3) * MEGABYTE


def test_shipped_heads_are_of_the_shipped_adapters(smollm2: BaseModel) -> None:
    layout = base_layout(
        smollm2.config, name=smollm2.name, digest=smollm2.digest, other_names=smollm2.names
    )
    weights = FusedWeights(smollm2.folder, smollm2.config, torch.float32)
    shared = validate_draft_head(
        EXAMPLES / "draft_heads" / SHARED, layout, None, {}.get, max_rank=256
    )
    known = {shared.digest: shared}.get
    for name in HEADS:
        if name != SHARED:
            adapter = load_adapter_weights(EXAMPLES / "adapters" / name, layout, weights, None)
            folder = EXAMPLES / "draft_heads" / name
            validate_draft_head(folder, layout, adapter.digest, known, max_rank=256)
