"""How a revision's files become tensors: what residency needs of whoever reads them."""

from typing import Protocol

from polyloom.adapters.source import AdapterSource
from polyloom.adapters.weights import AdapterWeights


class Loader(Protocol):
    """Reads a revision. Called on residency's own threads, several at once."""

    def load(self, source: AdapterSource) -> AdapterWeights:
        """Read, verify against the digest, and prepare.

        Raises an AdapterError if the content is wrong (the revision is then quarantined), OSError
        if it could not be read now (it is tried again later).
        """
        ...
