"""What may be called what: adapters, routes, aliases, share groups, and what follows an `@`."""

import re
from dataclasses import dataclass

DEFAULT_ALIAS = "prod"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_MOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_ALL_DIGITS = re.compile(r"[0-9]+")
_DIGEST = re.compile(r"sha256:([0-9a-f]{8,64})")
_DIGEST_MARK = "sha256:"


@dataclass(frozen=True)
class NumberRef:
    """`@3`: the revision of that number."""

    number: int


@dataclass(frozen=True)
class DigestRef:
    """`@sha256:<hex>`: the revision whose digest begins so."""

    prefix: str


@dataclass(frozen=True)
class AliasRef:
    """`@prod`: where the alias points."""

    alias: str


RevisionRef = NumberRef | DigestRef | AliasRef


def is_name(text: str) -> bool:
    """Whether `text` may name an adapter or a route."""
    return _NAME.fullmatch(text) is not None


def is_mount(text: str) -> bool:
    """Whether `text` may name a share group: what its members write before the `/`."""
    return _MOUNT.fullmatch(text) is not None


def is_alias(text: str) -> bool:
    """Whether `text` may be an alias: a name that is no number and no digest."""
    return is_name(text) and not _ALL_DIGITS.fullmatch(text) and not text.startswith(_DIGEST_MARK)


def parse_ref(text: str) -> RevisionRef | None:
    """What follows the `@`; None if it can refer to nothing."""
    if _NUMBER.fullmatch(text):
        return NumberRef(int(text))
    if digest := _DIGEST.fullmatch(text):
        return DigestRef(_DIGEST_MARK + digest.group(1))
    return AliasRef(text) if is_alias(text) else None
