"""Why a `model` string does not resolve.

RoutingError
├── ModelNotFound       model_not_found
├── NoDefaultRevision   no_default_revision
└── RevisionRetired     revision_retired
"""

from typing import ClassVar


class RoutingError(Exception):
    """Base of the resolver's errors; `model` is the string that the client sent."""

    code: ClassVar[str]

    def __init__(self, model: str, message: str) -> None:
        super().__init__(message)
        self.model = model
        self.message = message


class ModelNotFound(RoutingError):
    """Unknown, another tenant's, or a revision that is not ready. Never answered by the base."""

    code = "model_not_found"


class NoDefaultRevision(RoutingError):
    """A bare adapter name whose alias `prod` is not set."""

    code = "no_default_revision"


class RevisionRetired(RoutingError):
    """The revision was retired by its tenant."""

    code = "revision_retired"
