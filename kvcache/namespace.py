"""What sets one prefix cache apart from another, and the hashes that name blocks within it.

A block's hash is SHA-256 over its parent's hash and its own tokens; the first parent is the
namespace's root. So a hash stands for a namespace and every token up to the block's end, and two
namespaces have no block in common.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

OwnerKind = Literal["tenant", "group"]

FORMAT_VERSION = 1
_NONE, _INT, _STR = b"n", b"i", b"s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The isolation domain of a prefix cache: K and V are shared only where all of it agrees.

    owner_kind, owner_name: whose cache it is.  kv_dtype: of the stored K and V.  A draft head is
    not part of it: it neither reads nor writes this cache.
    """

    owner_kind: OwnerKind
    owner_name: str
    base_digest: str
    adapter_digest: str | None
    tokenizer_digest: str
    template_digest: str
    tool_schema_digest: str | None
    salt: str | None
    kv_dtype: str

    def root(self) -> bytes:
        """SHA-256 over the format version and every field, each with its type and its length."""
        digest = hashlib.sha256(b"polyloom prefix cache namespace")
        for value in (FORMAT_VERSION, *astuple(self)):
            digest.update(_framed(value))
        return digest.digest()


def block_hashes(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the whole blocks that `tokens` fill, the first of them a child of `parent`."""
    frame = struct.Struct(f"<cQ{block_size}I")
    hashes = []
    for end in range(block_size, len(tokens) + 1, block_size):
        framed = frame.pack(b"b", block_size, *tokens[end - block_size : end])
        parent = hashlib.sha256(parent + framed).digest()
        hashes.append(parent)
    return hashes


def _framed(value: int | str | None) -> bytes:
    """Type, length and content: no two values, nor two rows of values, have the same bytes."""
    if value is None:
        kind, content = _NONE, b""
    elif isinstance(value, int):
        kind, content = _INT, str(value).encode()
    else:
        kind, content = _STR, value.encode("utf-8", "surrogatepass")
    return struct.pack("<cQ", kind, len(content)) + content
