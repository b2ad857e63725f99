"""Drafts of heads: the equations, the noise, the vocabulary, and how heads come and go."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from polyloom.adapters.source import DraftHeadSource
from polyloom.platform.engine.draft_heads.heads import DraftHeads
from polyloom.platform.engine.draft_heads.packed import output_rows
from polyloom.platform.engine.draft_heads.training.network import HeadNetwork
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.model.weights import FusedWeights
from polyloom.platform.engine.sampler import sample
from polyloom.platform.engine.speculation.draft_head import DraftHeadDrafter
from polyloom.platform.engine.speculation.drafter import NO_PROPOSAL, DraftRow
from polyloom.routing.request import GenerationRequest
from polyloom.routing.scheduler.sequence import Sequence
from tests.platform.engine.draft_heads.conftest import HeadMaker

RequestFactory = Callable[..., GenerationRequest]


def row(
    request_factory: RequestFactory,
    source: DraftHeadSource,
    seed: int,
    length: int = 3,
    **options: object,
) -> DraftRow:
    """A sequence that has just sampled its second token, from a random state."""
    random = np.random.default_rng(seed)
    prompt, output = tuple(random.integers(0, 512, 4).tolist()), random.integers(0, 512, 2)
    request = msgspec.structs.replace(
        request_factory(prompt, seed=seed, max_tokens=50, **options), draft_head=source
    )
    sequence = Sequence(request, 0.0)
    sequence.tokens += output.tolist()
    hidden = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return DraftRow(sequence, length, hidden)


def network(heads: HeadMaker, weights: FusedWeights, name: str | None) -> HeadNetwork:
    """The head as training has it, loaded from its files."""
    if name is None:
        ids = torch.arange(128) + heads.shared.tensors["d2t"]
        return HeadNetwork(
            heads.config, heads.shared.tensors, output_rows(weights, ids, 512), None
        ).eval()
    delta = heads.deltas[name]
    ids = torch.arange(len(delta.tensors["d2t"])) + delta.tensors["d2t"]
    rows = output_rows(weights, ids, 512)
    built = HeadNetwork(delta.config, heads.shared.tensors, rows, delta.config.rank)
    stored = {
        f"linears.{k.removesuffix('.weight')}": t for k, t in delta.tensors.items() if "lora" in k
    }
    assert not built.load_state_dict(stored, strict=False).unexpected_keys
    return built.eval()


@torch.inference_mode()
def expected(
    net: HeadNetwork, ids: list[int], decoder: Decoder, of: DraftRow, length: int
) -> list[int]:
    """What sampling each next token from the network's logits by the target's rules gives."""
    assert of.hidden is not None
    features, tokens = of.hidden[None], list(of.sequence.tokens)
    for _ in range(length):
        features, logits = net(features, decoder.embed(torch.tensor(tokens[-1:])))
        full = np.full(512, -np.inf, dtype=np.float32)
        full[ids] = logits[0].numpy()
        sampling = of.sequence.request.sampling
        tokens.append(sample(full, sampling, tokens, of.sequence.prompt_len).token_id)
    return tokens[len(of.sequence.tokens) :]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_mixed_batch_drafts_what_each_head_alone_would_sample(
    heads: HeadMaker,
    weights: FusedWeights,
    decoder: Decoder,
    draft_heads: DraftHeads,
    request_factory: RequestFactory,
    temperature: float,
) -> None:
    names = [None, "first", "second", "first", None, "second"]
    rows = [
        row(request_factory, heads.source(name), seed, 3 - seed % 2, temperature=temperature)
        for seed, name in enumerate(names)
    ]
    drafter = DraftHeadDrafter(decoder, draft_heads)
    drafter.propose(rows)  # the deltas' loads are taken in at the next call
    proposals = drafter.propose(rows)
    used_own = set()
    for of, name, proposal in zip(rows, names, proposals, strict=True):
        head = heads.shared if name is None else heads.deltas[name]
        ids = (torch.arange(len(head.tensors["d2t"])) + head.tensors["d2t"]).tolist()
        length = min(of.length, head.config.max_drafts)
        wanted = expected(network(heads, weights, name), ids, decoder, of, length)
        assert list(proposal.tokens) == wanted
        assert all(0 < c <= 1 for c in proposal.confidences)
        used_own |= set(proposal.tokens) & set(ids[128:])
        solo = drafter.propose([of])[0]
        assert solo.tokens == proposal.tokens
        assert solo.confidences == pytest.approx(proposal.confidences, rel=1e-4)
    assert used_own  # tokens that only an adapter's head knows are drafted
    for of in rows:
        drafter.close(of.sequence.sequence_id)
    draft_heads.check()


def test_nothing_waits_for_a_head_and_a_corrupt_one_costs_drafts_only(
    heads: HeadMaker,
    decoder: Decoder,
    draft_heads: DraftHeads,
    request_factory: RequestFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = DraftHeadDrafter(decoder, draft_heads)
    good = heads.source("first")
    assert good.delta is not None
    lost = msgspec.structs.replace(
        good, delta=msgspec.structs.replace(good.delta, digest="sha256:" + "0" * 64)
    )
    rows = [row(request_factory, lost, 1), row(request_factory, good, 2)]
    assert drafter.propose(rows) == [NO_PROPOSAL, NO_PROPOSAL]
    for _ in range(3):
        corrupt, drafted = drafter.propose(rows)
    assert corrupt == NO_PROPOSAL and drafted.tokens
    assert len([r for r in caplog.records if "is not used" in r.message]) == 1
    nowhere = DraftHeadSource(
        msgspec.structs.replace(good.shared, path="/nowhere", digest="sha256:x")
    )
    other = row(request_factory, nowhere, 3)
    assert drafter.propose([other]) == [NO_PROPOSAL]
    for of in [*rows, other]:
        drafter.close(of.sequence.sequence_id)
    draft_heads.check()


def test_a_retired_head_goes_when_its_last_sequence_has_ended(
    heads: HeadMaker, decoder: Decoder, draft_heads: DraftHeads, request_factory: RequestFactory
) -> None:
    drafter = DraftHeadDrafter(decoder, draft_heads)
    of = row(request_factory, heads.source("first"), 1)
    for _ in range(3):
        drafter.propose([of])
    adapter = heads.deltas["first"].config.adapter_digest
    assert adapter is not None
    draft_heads.retire(adapter)
    assert drafter.propose([of])[0].tokens
    shared = draft_heads.ready(of.sequence.sequence_id, heads.source("first"))
    assert shared is not None
    drafter.close(of.sequence.sequence_id)
    assert shared.residency.snapshot() == ()
    draft_heads.retire(heads.shared.digest)
    draft_heads.check()
    assert draft_heads.ready("new", heads.source(None)) is not None  # a new upload of the same


def test_no_more_shared_heads_than_there_is_room_for(
    heads: HeadMaker, draft_heads: DraftHeads, tmp_path_factory: pytest.TempPathFactory
) -> None:
    others = []
    for seed in (7, 8):
        maker = HeadMaker(tmp_path_factory.mktemp("other"))
        folder = maker.source(None).shared.path
        maker.shared = maker._save("shared", maker.config, range(128), seed, 0.1)
        others.append(maker.source(None))
        assert folder
    for sequence, source in zip("ab", [heads.source(None), others[0]], strict=True):
        assert draft_heads.ready(sequence, source) is not None
    assert draft_heads.ready("c", others[1]) is None
    draft_heads.release("a")
    assert draft_heads.ready("c", others[1]) is not None
