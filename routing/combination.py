"""What one request runs on, as one immutable value."""

import hashlib

import msgspec


class Combination(msgspec.Struct, frozen=True):
    """Base, adapter revision, draft head revision and template, each by digest.

    A request carries one combination from its resolution to its last token, so it can never be
    served by a mixture of two.
    """

    base_digest: str
    template_digest: str
    adapter_digest: str | None = None
    head_digest: str | None = None

    @property
    def fingerprint(self) -> str:
        """Stable digest of the combination, OpenAI's `system_fingerprint`."""
        encoded = msgspec.json.encode(msgspec.structs.astuple(self))
        return "fp_" + hashlib.sha256(encoded).hexdigest()[:20]
