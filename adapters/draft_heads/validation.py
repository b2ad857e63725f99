"""Whether an upload may become a draft head of this base, or of this revision."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import pad

from polyloom.adapters.base_layout import BaseLayout, ModuleGroup
from polyloom.adapters.draft_heads.checkpoint import DraftHead, read_draft_head
from polyloom.adapters.draft_heads.layout import LINEARS
from polyloom.adapters.errors import CorruptAdapterError, InvalidAdapterError
from polyloom.adapters.weights import AdapterWeights, LoraTerm

SharedHeads = Callable[[str], DraftHead | None]
"""The shared head of this digest, None if there is none."""


def validate_draft_head(
    folder: Path,
    layout: BaseLayout,
    adapter_digest: str | None,
    shared_heads: SharedHeads,
    max_rank: int,
) -> DraftHead:
    """Check an uploaded head against the base, and against the revision it is uploaded for.

    adapter_digest: of that revision; None: it is to be a shared head of the base.
    Raises InvalidAdapterError naming the file, field or tensor that is wrong.
    """
    head = read_draft_head(folder)
    config = head.config
    if config.base_digest != layout.digest:
        message = f"is {config.base_digest}; this base is {layout.digest}"
        raise InvalidAdapterError("verifier.digest", message)
    for name in ("hidden_size", "vocab_size"):
        if getattr(config, name) != getattr(layout, name):
            message = f"is {getattr(config, name)}; the base's is {getattr(layout, name)}"
            raise InvalidAdapterError(name, message)
    if config.adapter_digest != adapter_digest:
        wanted = "a shared head has none" if adapter_digest is None else adapter_digest
        message = f"is {config.adapter_digest}; here it must be that of the revision: {wanted}"
        raise InvalidAdapterError("adapter_digest", message)
    if config.rank is not None and config.rank > max_rank:
        raise InvalidAdapterError("rank", f"is {config.rank}; the limit is {max_rank}")
    if config.shared_head_digest is not None:
        _check_delta(head, shared_heads(config.shared_head_digest))
    return head


def _check_delta(head: DraftHead, shared: DraftHead | None) -> None:
    config = head.config
    if shared is None or not shared.config.is_shared:
        message = f"{config.shared_head_digest} is no shared head of this base"
        raise InvalidAdapterError("shared_head_digest", message)
    for name in ("intermediate_size", "adapter_vocab_size", "rms_norm_eps"):
        wanted = getattr(shared.config, name)
        if getattr(config, name) != wanted:
            message = f"is {getattr(config, name)}; the shared head's is {wanted}"
            raise InvalidAdapterError(name, message)
    own = config.draft_vocab_size - shared.config.draft_vocab_size
    if not 0 <= own <= config.adapter_vocab_size:
        message = (
            f"is {config.draft_vocab_size}: the shared head has {shared.config.draft_vocab_size}"
            f" tokens, an adapter's may add {config.adapter_vocab_size}"
        )
        raise InvalidAdapterError("draft_vocab_size", message)
    if not torch.equal(head.tensors["d2t"][: len(shared.tensors["d2t"])], shared.tensors["d2t"]):
        raise InvalidAdapterError("d2t", "must begin as the shared head's does")


def load_verified(folder: Path, expected_digest: str) -> DraftHead:
    """Read a stored head.

    Raises CorruptAdapterError when it is not the content of that digest, OSError when it cannot be
    read now.
    """
    try:
        head = read_draft_head(folder)
    except InvalidAdapterError as error:
        raise CorruptAdapterError(expected_digest, str(error)) from error
    if head.digest != expected_digest:
        raise CorruptAdapterError(expected_digest, f"the stored files are {head.digest}")
    return head


def delta_weights(head: DraftHead, shared: DraftHead) -> AdapterWeights:
    """An adapter's head in the form that pages take: rank terms on the shared head's linears.

    Raises CorruptAdapterError if it is no delta on this shared head.
    """
    if head.config.shared_head_digest != shared.digest:
        raise CorruptAdapterError(head.digest, f"is no delta on the shared head {shared.digest}")
    try:
        _check_delta(head, shared)
    except InvalidAdapterError as error:
        raise CorruptAdapterError(head.digest, str(error)) from error
    unused = (
        shared.config.draft_vocab_size
        + shared.config.adapter_vocab_size
        - head.config.draft_vocab_size
    )
    terms = []
    for name, group in LINEARS.items():
        a = head.tensors[f"{name}.lora_A.weight"].float()
        b = head.tensors[f"{name}.lora_B.weight"].float()
        if group is ModuleGroup.HEAD:
            b = pad(b, (0, 0, 0, unused))
        terms.append(LoraTerm(group, layer=0, offset=0, a=a, b=b))
    return AdapterWeights(digest=head.digest, terms=tuple(terms), rows=())
