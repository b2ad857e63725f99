"""Training a head on the tiny Llama's own responses: resumable, judged, and as the engine runs it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polyloom.adapters.draft_heads.checkpoint import DraftHead, read_draft_head
from polyloom.adapters.source import AdapterSource
from polyloom.platform.engine.draft_heads.errors import TrainingError
from polyloom.platform.engine.draft_heads.training.acceptance import (
    Replay,
    gain_lower_bound,
    replay_ngram,
)
from polyloom.platform.engine.draft_heads.training.fit import FitConfig
from polyloom.platform.engine.draft_heads.training.job import HeadShape, Stage, TrainingJob, train
from polyloom.platform.engine.draft_heads.training.responses import Target, target
from polyloom.platform.engine.draft_heads.training.samples import (
    Response,
    draft_vocabulary,
    samples,
)
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.settings import EngineSettings

BASE_DIGEST = "sha256:" + "b" * 64
STOP = 2


class Told:
    """Keeps what a job says, and kills it where a test wants."""

    def __init__(self, kill_in_epoch: float | None = None) -> None:
        self.done: dict[str, float] = {}
        self._kill = kill_in_epoch

    def begin(self, stage: Stage, total: int) -> None:
        self.done[stage] = 0

    def advance(self, stage: Stage, done: float, note: str = "") -> None:
        self.done[stage] += done
        if stage == "train" and self._kill is not None and self.done[stage] > self._kill:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def job(
    tiny_llama_folder: Path,
    settings_factory: Callable[..., EngineSettings],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., TrainingJob]:
    """A small job. Prompts of one token: what a random model says of them repeats itself soon."""
    work = tmp_path_factory.mktemp("work")

    def make(**changes: object) -> TrainingJob:
        adapter = changes.get("adapter")
        assert adapter is None or isinstance(adapter, AdapterSource)

        def make_target() -> Target:
            return target(settings_factory(base_digest=BASE_DIGEST), adapter, (STOP,))

        usual = TrainingJob(
            model_folder=tiny_llama_folder,
            base_name="tiny",
            base_digest=BASE_DIGEST,
            config=read_config(tiny_llama_folder),
            adapter=None,
            shared=None,
            prompts=tuple((n,) for n in range(10, 90)),
            held_out=tuple((n,) for n in range(100, 112)),
            work=work,
            target=make_target,
            max_tokens=12,
            shape=HeadShape(
                draft_vocab_size=400, adapter_vocab_size=64, intermediate_size=64, rank=8
            ),
            fit=FitConfig(epochs=3, batch_size=64, learning_rate=1e-2),
        )
        return replace(usual, **changes)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="module")
def shared(
    job: Callable[..., TrainingJob], tmp_path_factory: pytest.TempPathFactory
) -> tuple[DraftHead, Path]:
    out = tmp_path_factory.mktemp("trained") / "shared"
    return train(job(), out, Told()), out


def test_a_shared_head_is_trained_judged_and_saved(shared: tuple[DraftHead, Path]) -> None:
    head, folder = shared
    assert read_draft_head(folder).digest == head.digest
    record = head.config.training
    assert record is not None and record.gate is not None
    assert record.prompts == 80 and record.tokens > 80
    assert record.gate.shared_head is None and record.gate.prompts == 12
    assert record.gate.head > 1.02
    assert record.gate.passed == (record.gate.gain_lower_bound > 0)


def test_a_killed_job_goes_on_where_it_was(
    job: Callable[..., TrainingJob], shared: tuple[DraftHead, Path], tmp_path: Path
) -> None:
    """Killed in its second epoch, then run again: the same head as without a break."""
    elsewhere = job(work=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(elsewhere, tmp_path / "out", Told(kill_in_epoch=1.5))
    generated = sorted((elsewhere.folder / "generate").iterdir())
    stamps = [file.stat().st_mtime_ns for file in generated]
    told = Told()
    head = train(elsewhere, tmp_path / "out", told)
    assert [file.stat().st_mtime_ns for file in generated] == stamps
    assert told.done["train"] == pytest.approx(2)
    assert head.digest == shared[0].digest


def test_an_adapters_head_is_a_delta_with_tokens_of_its_own(
    job: Callable[..., TrainingJob],
    shared: tuple[DraftHead, Path],
    adapter_factory: Callable[..., AdapterSource],
    tmp_path: Path,
) -> None:
    adapter = adapter_factory(8, 3)
    head = train(job(adapter=adapter, shared=shared[0], work=tmp_path), tmp_path / "delta", Told())
    config = head.config
    assert (config.adapter_digest, config.shared_head_digest) == (adapter.digest, shared[0].digest)
    assert 400 <= config.draft_vocab_size <= 464
    assert torch.equal(head.tensors["d2t"][:400], shared[0].tensors["d2t"])
    gate = config.training.gate if config.training else None
    assert gate is not None and gate.shared_head is not None
    assert gate.head >= gate.shared_head  # it begins as the shared head


def test_a_job_that_cannot_be_says_why(
    job: Callable[..., TrainingJob], shared: tuple[DraftHead, Path], tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match="no prompts"):
        train(job(prompts=()), tmp_path, Told())
    with pytest.raises(TrainingError, match="held-out"):
        train(job(held_out=((3,),)), tmp_path, Told())
    with pytest.raises(TrainingError, match="shared"):
        train(job(shared=shared[0]), tmp_path, Told())
    with pytest.raises(TrainingError, match="prompt 1: .*in \\[0, 512\\)"):
        train(job(prompts=((600,),), work=tmp_path), tmp_path, Told())


def response(prompt: list[int], output: list[int]) -> Response:
    hidden = torch.arange(len(output) * 2, dtype=torch.float32).view(-1, 2)
    return Response(tuple(prompt), tuple(output), hidden)


def test_places_follow_their_own_response_only() -> None:
    laid = samples([response([9], [1, 2, 3]), response([9], [4, 5])], depth=2)
    assert laid.features.tolist() == [0, 1, 3]
    assert laid.tokens.tolist() == [[1, 2, 3], [2, 3, -1], [4, 5, -1]]
    assert laid.states.tolist() == [[1, 2], [2, 0], [4, 0]]


def test_the_draft_vocabulary_is_what_is_said_most() -> None:
    said = [response([30, 30, 31], [7, 7, 8, 7, 9, 8])]
    assert draft_vocabulary(said, 2, 40).tolist() == [7, 8]
    assert draft_vocabulary(said, 6, 40).tolist() == [0, 7, 8, 9, 30, 31]


def test_an_ngram_is_replayed_as_the_engine_would_run_it() -> None:
    """`5 6 7 8` comes twice: after the second `5 6` two drafts are right and the third is not."""
    replayed = replay_ngram([response([5, 6, 7, 8, 1], [5, 6, 7, 8, 2, 3])], 3)
    assert replayed.tokens.tolist() == [5]
    assert replayed.steps.tolist() == [3]  # 6; then 7 8 and 2; then 3


def test_the_gate_wants_more_than_luck() -> None:
    def replay(lengths: list[float]) -> Replay:
        return Replay(torch.tensor(lengths).double().numpy() * 10, torch.full((8,), 10.0).numpy())

    plain = replay([1.5] * 8)
    assert gain_lower_bound(replay([1.7] * 8), [plain]) == pytest.approx(0.2)
    assert gain_lower_bound(replay([3.1] + [1.4] * 7), [plain]) < 0
    assert gain_lower_bound(replay([1.7] * 8), [plain, replay([1.9] * 8)]) < 0
