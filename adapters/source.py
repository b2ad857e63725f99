"""Where a revision's verified files lie."""

import msgspec


class AdapterSource(msgspec.Struct, frozen=True):
    """A revision as the engine is told of it: identity and verified files, never a name.

    digest: `sha256:<hex>` of the revision's canonical content.
    path: folder with the adapter's files as `adapters.artifact` laid them.
    """

    digest: str
    path: str
