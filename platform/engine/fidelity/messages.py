"""What the validator process is told and what it answers: msgpack frames on its standard streams.

A frame is its length in 4 bytes, big-endian, then one msgspec struct. The first frame in is
`FidelitySettings`; then each `Check` is answered by `Verdict` or `Uncheckable`.
"""

from typing import Literal

import msgspec

BOUND = 1e-3
"""Largest absolute logprob difference, in fp32, that a revision may show."""


class FidelitySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker checks against.

    model_folder: the base in Hugging Face format.  memory_bytes: what both models together may
    take as fp32; a base that needs more is streamed layer by layer.  threads: of torch.
    implementation: of the engine's ops, as in `EngineSettings`.
    """

    model_folder: str
    base_name: str
    base_digest: str
    threads: int
    memory_bytes: int
    implementation: Literal["auto", "reference"] = "auto"


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Compare the adapter in `folder`, whose content must be `digest`."""

    folder: str
    digest: str


class Verdict(msgspec.Struct, frozen=True, tag="verdict", kw_only=True):
    """The engine's fp32 logits against PEFT's over the probe.

    max_logprob_diff: largest absolute difference of any token's logprob at any position.
    max_effect: largest absolute logprob difference between the adapter and the bare base; 0 for an
    adapter that does nothing.  streamed: whether the base was streamed.
    """

    digest: str
    max_logprob_diff: float
    max_effect: float
    probe_tokens: int
    seconds: float
    streamed: bool
    bound: float = BOUND

    @property
    def passed(self) -> bool:
        # Written so that a NaN does not pass.
        return self.max_logprob_diff <= self.bound


class Uncheckable(msgspec.Struct, frozen=True, tag="uncheckable"):
    """There is no verdict, and trying again would not bring one."""

    message: str


Answer = Verdict | Uncheckable
