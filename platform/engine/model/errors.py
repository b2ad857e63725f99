"""Errors of base models.

ModelError
├── UnsupportedArchitectureError    no decoder for this architecture; it is named
├── UnsupportedConfigError          a config field asks for what the decoder does not do
├── CheckpointError                 a weight file or tensor is missing, superfluous or misshapen
├── BaseNotFoundError               the reference names nothing that can be loaded
└── BaseFetchError                  fetching, checking or converting a base failed
"""


class ModelError(Exception):
    """Root of everything this package raises on purpose."""


class UnsupportedArchitectureError(ModelError):
    """The checkpoint's architecture has no decoder here."""

    def __init__(self, architecture: str, supported: tuple[str, ...]) -> None:
        super().__init__(
            f"architecture {architecture!r} is not supported; supported: {', '.join(supported)}"
        )
        self.architecture = architecture


class UnsupportedConfigError(ModelError):
    """A config field has a value whose meaning the decoder does not implement."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"config field {field!r} = {value!r}: {reason}")
        self.field = field


class CheckpointError(ModelError):
    """A file or tensor of the checkpoint is not what the config asks for."""

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"{subject}: {reason}")
        self.subject = subject


class BaseNotFoundError(ModelError):
    """A base reference is no known name, folder, `.gguf` file or hub id."""

    def __init__(self, reference: str, reason: str) -> None:
        super().__init__(f"base {reference!r}: {reason}")
        self.reference = reference


class BaseFetchError(ModelError):
    """A base was found but could not be fetched, verified or converted."""

    def __init__(self, reference: str, reason: str) -> None:
        super().__init__(f"base {reference!r}: {reason}")
        self.reference = reference
