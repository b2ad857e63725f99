"""Training a head from prompts to a judged artefact: generate, fit, gate, save."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import torch
from torch import Tensor

from polyloom.adapters.draft_heads.checkpoint import (
    DraftHead,
    draft_vocabulary,
    save_draft_head,
    vocabulary_tensors,
)
from polyloom.adapters.draft_heads.config import (
    DraftHeadConfig,
    GateRecord,
    ProposalMethod,
    SpeculatorsConfig,
    TrainingRecord,
    Verifier,
)
from polyloom.adapters.source import AdapterSource
from polyloom.platform.engine.draft_heads.errors import TrainingError
from polyloom.platform.engine.draft_heads.packed import output_rows
from polyloom.platform.engine.draft_heads.training.acceptance import (
    Replay,
    gain_lower_bound,
    replay_head,
    replay_ngram,
)
from polyloom.platform.engine.draft_heads.training.fit import Fit, FitConfig, FitProgress
from polyloom.platform.engine.draft_heads.training.network import HeadNetwork, fresh_weights
from polyloom.platform.engine.draft_heads.training.responses import Target, responses
from polyloom.platform.engine.draft_heads.training.samples import Response
from polyloom.platform.engine.draft_heads.training.samples import (
    draft_vocabulary as frequent_tokens,
)
from polyloom.platform.engine.model.config import DecoderConfig
from polyloom.platform.engine.model.weights import FusedWeights

MIN_HELD_OUT = 4

Stage = Literal["generate", "generate held-out", "train"]


class Progress(Protocol):
    """What a job tells of itself: prompts while it generates, epochs while it trains."""

    def begin(self, stage: Stage, total: int) -> None:
        """A stage of `total` units begins."""
        ...

    def advance(self, stage: Stage, done: float, note: str = "") -> None:
        """`done` units more."""
        ...


class HeadShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that training chooses, as the config names them: all but `rank` are a shared head's."""

    draft_vocab_size: int = 4096
    adapter_vocab_size: int = 512
    intermediate_size: int = 1024
    rank: int = 64


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One head to train.

    model_folder, base_name, base_digest: the base.  adapter, shared: for an adapter's head, its
    revision and the shared head that it is a delta on; None for a shared head.
    prompts, held_out: token ids.  max_tokens: of a response.  work: folder in which a killed job of
    the same inputs goes on.
    """

    model_folder: Path
    base_name: str
    base_digest: str
    config: DecoderConfig
    adapter: AdapterSource | None
    shared: DraftHead | None
    prompts: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    work: Path
    target: Callable[[], Target]
    max_tokens: int = 128
    shape: HeadShape
    fit: FitConfig

    @property
    def folder(self) -> Path:
        """This job's own folder in `work`: of its inputs, not of its time limit."""
        inputs = msgspec.json.encode(
            (
                self.base_digest,
                None if self.adapter is None else self.adapter.digest,
                None if self.shared is None else self.shared.digest,
                self.prompts,
                self.held_out,
                self.max_tokens,
                self.shape,
                (self.fit.depth, self.fit.epochs, self.fit.batch_size, self.fit.learning_rate),
            )
        )
        return self.work / hashlib.sha256(inputs).hexdigest()[:16]


def train(job: TrainingJob, out: Path, progress: Progress) -> DraftHead:
    """Run the job and save the head in `out`, with the gate's figures in its training record.

    Raises TrainingError naming what is wrong with the inputs.
    """
    _check(job)
    learned = _responses(job, "generate", job.prompts, progress)
    held_out = _responses(job, "generate held-out", job.held_out, progress)
    weights = FusedWeights(job.model_folder, job.config, torch.bfloat16)
    torch.manual_seed(job.fit.seed)
    start = _begin(job, learned, weights)
    network = start.network()
    fit = Fit(network, start.target_ids, start.embeddings, job.fit, job.folder / "training.state")
    progress.begin("train", job.fit.epochs)
    result = fit.run(learned, held_out, partial(_tell, progress))
    record = TrainingRecord(
        prompts=len(job.prompts),
        tokens=sum(len(r.output) for r in learned),
        epochs=result.epochs,
        seconds=round(result.seconds, 1),
        gate=_gate(job, start, network, held_out),
    )
    tensors = network.stored(torch.bfloat16)
    tensors |= vocabulary_tensors(start.target_ids, start.config.vocab_size)
    return save_draft_head(out, msgspec.structs.replace(start.config, training=record), tensors)


@dataclass(frozen=True)
class _Start:
    """Where training begins. weights: of a shared head, fresh or the one that the delta is on."""

    config: DraftHeadConfig
    target_ids: Tensor
    weights: dict[str, Tensor]
    output_rows: Tensor
    embeddings: Tensor

    def network(self) -> HeadNetwork:
        return HeadNetwork(self.config, self.weights, self.output_rows, self.config.rank)

    def shared_network(self) -> HeadNetwork:
        """What the delta is on."""
        rows = self.output_rows[: len(self.weights["d2t"])]
        return HeadNetwork(self.config, self.weights, rows, None)


def _begin(job: TrainingJob, learned: Sequence[Response], base: FusedWeights) -> _Start:
    if job.shared is None:
        config = _shared_config(job)
        ids = frequent_tokens(learned, config.draft_vocab_size, config.vocab_size)
        weights = fresh_weights(config, base.final_norm())
    else:
        ids = _with_own_tokens(job.shared, learned)
        config, weights = _delta_config(job, job.shared, len(ids)), job.shared.tensors
    return _Start(
        config,
        ids,
        weights,
        output_rows(base, ids, config.vocab_size),
        base.embedding() * job.config.embedding_scale,
    )


def _with_own_tokens(shared: DraftHead, learned: Sequence[Response]) -> Tensor:
    """The shared draft vocabulary, then what the responses use most of all that it lacks."""
    ids = draft_vocabulary(shared.tensors)
    known = set(ids.tolist())
    counts = Counter(t for r in learned for t in r.output if t not in known)
    own = [token for token, _ in counts.most_common(shared.config.adapter_vocab_size)]
    return torch.cat([ids, torch.tensor(sorted(own), dtype=torch.int64)])


def _delta_config(job: TrainingJob, shared: DraftHead, draft_vocab_size: int) -> DraftHeadConfig:
    return msgspec.structs.replace(
        shared.config,
        draft_vocab_size=draft_vocab_size,
        adapter_digest=None if job.adapter is None else job.adapter.digest,
        shared_head_digest=shared.digest,
        rank=job.shape.rank,
    )


def _shared_config(job: TrainingJob) -> DraftHeadConfig:
    verifier = Verifier(job.base_name, (job.config.architecture,), job.base_digest)
    return DraftHeadConfig(
        speculators_config=SpeculatorsConfig(verifier, (ProposalMethod(job.fit.depth),)),
        hidden_size=job.config.hidden_size,
        intermediate_size=job.shape.intermediate_size,
        vocab_size=job.config.vocab_size,
        draft_vocab_size=min(job.shape.draft_vocab_size, job.config.vocab_size),
        adapter_vocab_size=job.shape.adapter_vocab_size,
        rms_norm_eps=job.config.norm_eps,
    )


def _gate(
    job: TrainingJob, start: _Start, network: HeadNetwork, held_out: Sequence[Response]
) -> GateRecord:
    """Better than the shared head and than n-grams, with a bootstrap lower bound above zero."""

    def replay(judged: HeadNetwork) -> Replay:
        ids = start.target_ids[: len(judged.output_rows)]
        return replay_head(judged, held_out, start.embeddings, ids, job.fit.depth)

    own = replay(network)
    ngram = replay_ngram(held_out, job.fit.depth)
    shared = None if job.shared is None else replay(start.shared_network())
    bound = gain_lower_bound(own, [ngram] if shared is None else [ngram, shared])
    return GateRecord(
        drafts=job.fit.depth,
        prompts=len(held_out),
        tokens=sum(len(r.output) for r in held_out),
        head=round(own.acceptance_length, 3),
        shared_head=None if shared is None else round(shared.acceptance_length, 3),
        ngram=round(ngram.acceptance_length, 3),
        gain_lower_bound=round(bound, 3),
        passed=bound > 0,
    )


def _responses(
    job: TrainingJob, stage: Stage, prompts: Sequence[tuple[int, ...]], progress: Progress
) -> list[Response]:
    progress.begin(stage, len(prompts))
    made = responses(
        job.target,
        prompts,
        job.max_tokens,
        job.folder / stage.replace(" ", "-"),
        partial(progress.advance, stage),
    )
    useful = [r for r in made if len(r.output) > 1]
    if not useful:
        raise TrainingError(f"{stage}: no response has two tokens to learn from")
    return useful


def _check(job: TrainingJob) -> None:
    if (job.adapter is None) != (job.shared is None):
        raise TrainingError("an adapter's head is trained on a shared head, a shared one on none")
    if not job.prompts:
        raise TrainingError("there are no prompts")
    if len(job.held_out) < MIN_HELD_OUT:
        raise TrainingError(f"the gate needs at least {MIN_HELD_OUT} held-out prompts")


def _tell(progress: Progress, fit: FitProgress) -> None:
    note = f"loss {fit.loss:.3f}, acceptance length {fit.best:.2f}"
    progress.advance("train", fit.epochs, note)
