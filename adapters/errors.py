"""Errors of the adapter code.

AdapterError
├── InvalidAdapterError     the upload is wrong; `param` is the file, field or tensor (422)
├── TooLargeError           the upload is over a limit of size (413)
├── CorruptAdapterError     stored files are not what their digest says: quarantine the revision
├── AdapterTooLargeError    the revision needs more pages than the pools have in all
└── NoCapacityError         the pools are full of pinned revisions now; waiting may help
"""


class AdapterError(Exception):
    """Root of everything the adapter code raises on purpose."""


class InvalidAdapterError(AdapterError):
    """The upload cannot become a revision.

    param: the file, config field or tensor that is wrong.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message


class TooLargeError(AdapterError):
    """The upload is over the limit named `param`."""

    def __init__(self, param: str, limit: int, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.limit = limit


class CorruptAdapterError(AdapterError):
    """The stored files of revision `digest` cannot be read, or are not its content any more."""

    def __init__(self, digest: str, message: str) -> None:
        super().__init__(f"{digest}: {message}")
        self.digest = digest


class AdapterTooLargeError(AdapterError):
    """Revision `digest` can never be resident: the pools are smaller than it is."""

    def __init__(self, digest: str, message: str) -> None:
        super().__init__(f"{digest}: {message}")
        self.digest = digest


class NoCapacityError(AdapterError):
    """Nothing can be evicted to make room for revision `digest` at this moment."""

    def __init__(self, digest: str, message: str) -> None:
        super().__init__(f"{digest}: {message}")
        self.digest = digest
