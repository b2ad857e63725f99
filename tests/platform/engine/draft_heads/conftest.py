"""Random draft heads of the tiny Llama, and the drafter that runs them, without threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from polyloom.adapters.config import AdapterPoolConfig
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
from polyloom.adapters.errors import AdapterError
from polyloom.adapters.kernels.choice import LoraChoice
from polyloom.adapters.kernels.reference import ReferenceLoraOp
from polyloom.adapters.source import AdapterSource, DraftHeadSource
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.draft_heads.heads import DraftHeads
from polyloom.platform.engine.kernels.ops import ReferenceOps
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.weights import FusedWeights

SHARED_IDS = list(range(0, 512, 4))
VERIFIER = Verifier("tiny", ("LlamaForCausalLM",), "sha256:" + "b" * 64)


class InlineExecutor(Executor):
    """Runs what is submitted at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except (OSError, AdapterError) as error:
            future.set_exception(error)
        return future


class HeadMaker:
    """Writes random heads below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = DraftHeadConfig(
            speculators_config=SpeculatorsConfig(VERIFIER, (ProposalMethod(3),)),
            hidden_size=64,
            intermediate_size=96,
            vocab_size=512,
            draft_vocab_size=len(SHARED_IDS),
            adapter_vocab_size=16,
            rms_norm_eps=1e-5,
        )
        self.shared = self._save("shared", self.config, SHARED_IDS, 0, 0.3)
        self.deltas: dict[str, DraftHead] = {}

    def source(self, name: str | None) -> DraftHeadSource:
        """Of the shared head (None), or of an adapter's head that was made as `name`."""
        shared = AdapterSource(self.shared.digest, str(self._folder / "shared"))
        if name is None:
            return DraftHeadSource(shared)
        delta = AdapterSource(self.deltas[name].digest, str(self._folder / name))
        return DraftHeadSource(shared, delta)

    def delta(self, name: str, seed: int, own: Sequence[int] = (), depth: int = 3) -> DraftHead:
        config = msgspec.structs.replace(
            self.config,
            speculators_config=SpeculatorsConfig(VERIFIER, (ProposalMethod(depth),)),
            draft_vocab_size=len(SHARED_IDS) + len(own),
            adapter_digest="sha256:" + f"{seed:064x}",
            shared_head_digest=self.shared.digest,
            rank=5,
        )
        self.deltas[name] = self._save(name, config, [*SHARED_IDS, *own], seed, 0.5)
        return self.deltas[name]

    def _save(
        self, name: str, config: DraftHeadConfig, ids: Sequence[int], seed: int, scale: float
    ) -> DraftHead:
        random = torch.Generator().manual_seed(seed)
        tensors = {
            key: torch.randn(shape, generator=random) * scale
            for key, shape in expected_shapes(config).items()
            if key not in ("d2t", "t2d")
        }
        if config.rank is not None:  # so that own tokens win now and then
            tensors["lm_head.lora_B.weight"][len(SHARED_IDS) :] *= 6
        tensors |= vocabulary_tensors(torch.tensor(list(ids)), config.vocab_size)
        return save_draft_head(self._folder / name, config, tensors)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> HeadMaker:
    maker = HeadMaker(tmp_path_factory.mktemp("heads"))
    maker.delta("first", 1, own=[1, 2, 3])
    maker.delta("second", 2, own=[501, 502, 503, 505, 506, 507, 509], depth=2)
    return maker


@pytest.fixture(scope="module")
def weights(tiny_llama_folder: Path) -> FusedWeights:
    return FusedWeights(tiny_llama_folder, read_config(tiny_llama_folder), torch.float32)


@pytest.fixture(scope="module")
def decoder(weights: FusedWeights, tiny_llama_folder: Path) -> Decoder:
    config = read_config(tiny_llama_folder)
    return Decoder(config, weights, ReferenceOps(Capabilities()), torch.float32)


@pytest.fixture
def draft_heads(weights: FusedWeights) -> DraftHeads:
    pool = AdapterPoolConfig(1 << 22, 8, 64, torch.float32, torch.device("cpu"))
    capabilities = Capabilities()
    ops, lora = ReferenceOps(capabilities), LoraChoice(ReferenceLoraOp())
    return DraftHeads(weights, ops, lora, pool, capabilities, InlineExecutor)
