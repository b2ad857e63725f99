"""What a draft head is, in words and numbers: its `config.json`.

A *shared head* serves a whole base. An *adapter's head* is a low-rank delta on one shared head, made
for one revision; it may add tokens of its own to the shared draft vocabulary. The file follows the speculators library: `speculators_config` names algorithm,
proposal methods and verifier; `draft_vocab_size` goes with the tensors `d2t` and `t2d`.
"""

from pathlib import Path
from typing import Literal

import msgspec

from polyloom.adapters.errors import InvalidAdapterError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MAX_SPECULATIVE_TOKENS = 8

_DIGEST_LENGTH = 71


class ProposalMethod(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How drafts are proposed: `coupled` draws them with the target's own noise (greedily for a
    greedy request), up to `speculative_tokens` of them."""

    speculative_tokens: int
    proposal_type: Literal["coupled"] = "coupled"


class Verifier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base that verifies the drafts; `digest` is its identity, the name is for people."""

    name_or_path: str
    architectures: tuple[str, ...]
    digest: str


class SpeculatorsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The block of this name in the speculators library's configs."""

    verifier: Verifier
    proposal_methods: tuple[ProposalMethod, ...]
    algorithm: Literal["eagle_mlp"] = "eagle_mlp"
    default_proposal_method: Literal["coupled"] = "coupled"


class GateRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the gate measured on held-out prompts: acceptance lengths (bonus token included) at
    `drafts` drafts, and the bootstrap's lower bound of the gain over the best of the others."""

    drafts: int
    prompts: int
    tokens: int
    head: float
    shared_head: float | None
    ngram: float
    gain_lower_bound: float
    passed: bool


class TrainingRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the weights come from."""

    prompts: int
    tokens: int
    epochs: int
    seconds: float
    gate: GateRecord | None = None


class DraftHeadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One draft head.

    Per drafted token, from the features h of the last one and the embedding e of the token after it:
    `x = fc [norm(h); norm(e)]`, then `x += down(silu(gate(norm(x))) * up(norm(x)))`; its logits are
    the base's own output head, on the draft vocabulary's rows, of `norm(x)`; x is the next h.

    draft_vocab_size: tokens that it can draft; in an adapter's head the shared ones, then its own.
    adapter_vocab_size: how many of its own an adapter's head may have at most; a shared head says it.
    adapter_digest, shared_head_digest, rank: of an adapter's head; None in a shared one.
    """

    speculators_config: SpeculatorsConfig
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    adapter_vocab_size: int
    rms_norm_eps: float
    adapter_digest: str | None = None
    shared_head_digest: str | None = None
    rank: int | None = None
    training: TrainingRecord | None = None
    speculators_model_type: Literal["polyloom_draft_head"] = "polyloom_draft_head"

    @property
    def base_digest(self) -> str:
        """The base that the head drafts for."""
        return self.speculators_config.verifier.digest

    @property
    def is_shared(self) -> bool:
        """A whole head for a base, not a delta for one adapter."""
        return self.shared_head_digest is None

    @property
    def max_drafts(self) -> int:
        """Tokens that it is meant to draft in a row."""
        return self.speculators_config.proposal_methods[0].speculative_tokens


class AppliedHeadFields(msgspec.Struct, frozen=True):
    """What of a config means something to who runs the head; its digest covers these."""

    base_digest: str
    max_drafts: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    adapter_vocab_size: int
    rms_norm_eps: float
    adapter_digest: str | None
    shared_head_digest: str | None
    rank: int | None


def applied_fields(config: DraftHeadConfig) -> AppliedHeadFields:
    """Without the names and records that change nothing."""
    return AppliedHeadFields(
        base_digest=config.base_digest,
        max_drafts=config.max_drafts,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        adapter_vocab_size=config.adapter_vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        adapter_digest=config.adapter_digest,
        shared_head_digest=config.shared_head_digest,
        rank=config.rank,
    )


def read_config(folder: Path) -> DraftHeadConfig:
    """Read and check `config.json` for itself. Raises InvalidAdapterError naming the field."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise InvalidAdapterError(CONFIG_FILE, "is missing")
    try:
        config = msgspec.json.decode(path.read_bytes(), type=DraftHeadConfig)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        raise InvalidAdapterError(place.rstrip("`").lstrip(".") or CONFIG_FILE, message) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidAdapterError(CONFIG_FILE, f"is not JSON: {error}") from error
    _check(config)
    return config


def _check(config: DraftHeadConfig) -> None:
    for name in ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size"):
        _require(getattr(config, name) > 0, name, "must be positive")
    _require(
        config.draft_vocab_size <= config.vocab_size,
        "draft_vocab_size",
        f"{config.draft_vocab_size} is over the vocabulary's {config.vocab_size}",
    )
    _require(config.adapter_vocab_size >= 0, "adapter_vocab_size", "must not be negative")
    _require(config.rms_norm_eps > 0, "rms_norm_eps", "must be positive")
    methods = config.speculators_config.proposal_methods
    _require(len(methods) == 1, "proposal_methods", "must hold exactly one method")
    _require(
        1 <= config.max_drafts <= MAX_SPECULATIVE_TOKENS,
        "speculative_tokens",
        f"must be 1 to {MAX_SPECULATIVE_TOKENS}, not {config.max_drafts}",
    )
    digests = {
        "verifier.digest": config.base_digest,
        "adapter_digest": config.adapter_digest,
        "shared_head_digest": config.shared_head_digest,
    }
    for name, digest in digests.items():
        if digest is not None:
            _require(_is_digest(digest), name, "must be sha256:<64 hex digits>")
    delta = (config.adapter_digest, config.shared_head_digest, config.rank)
    together = all(part is None for part in delta) or all(part is not None for part in delta)
    _require(
        together, "shared_head_digest", "goes with adapter_digest and rank: give all three or none"
    )
    _require(config.rank is None or config.rank > 0, "rank", "must be positive")


def _is_digest(text: str) -> bool:
    digits = text.removeprefix("sha256:")
    return len(text) == _DIGEST_LENGTH and set(digits) <= set("0123456789abcdef")


def _require(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise InvalidAdapterError(param, message)
