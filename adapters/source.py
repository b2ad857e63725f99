"""Where the verified files of a revision, and of a draft head, lie."""

import msgspec


class AdapterSource(msgspec.Struct, frozen=True):
    """A revision as the engine is told of it: identity and verified files, never a name.

    digest: `sha256:<hex>` of the revision's canonical content.
    path: folder with the adapter's files as `adapters.artifact` laid them.
    """

    digest: str
    path: str


class DraftHeadSource(msgspec.Struct, frozen=True):
    """A draft head as the engine is told of it: the base's shared head, and an adapter's delta on
    it or None for the shared head alone."""

    shared: AdapterSource
    delta: AdapterSource | None = None

    @property
    def digest(self) -> str:
        """What a combination names: the head that was made for this adapter, or the shared one."""
        return (self.delta or self.shared).digest
