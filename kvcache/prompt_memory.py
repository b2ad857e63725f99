"""Recent prompts by owner, to say why a prompt was not found in the prefix cache.

An owner's prompts are compared with nobody else's. Prompts, owners and tokens are bounded.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyloom.kvcache.namespace import Namespace
from polyloom.kvcache.prefix_counters import Miss, MissReason
from polyloom.kvcache.prefix_index import Epoch

PROMPTS_PER_OWNER = 64
MAX_TOKENS = 1 << 21  # of all owners; 8 MiB
SHOWN_TOKENS = 16

_Tokens = NDArray[np.int32]
_Owner = tuple[str, str]
_FIELDS: tuple[tuple[str, MissReason], ...] = (
    ("base_digest", "revision"),
    ("adapter_digest", "revision"),
    ("template_digest", "template"),
    ("tokenizer_digest", "tokenizer"),
    ("tool_schema_digest", "tools"),
    ("salt", "salt"),
)


@dataclass(frozen=True, slots=True)
class _Prompt:
    epoch: Epoch
    tokens: _Tokens


@dataclass(frozen=True, slots=True)
class _Likeness:
    """How much of a prompt an earlier one has: common leading tokens, namespace fields apart."""

    earlier: _Prompt
    common: int
    apart: tuple[MissReason, ...]


class PromptMemory:
    """The last prompts of each owner whose blocks were cached."""

    def __init__(self, block_size: int, max_tokens: int = MAX_TOKENS) -> None:
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._owners: OrderedDict[_Owner, OrderedDict[bytes, _Prompt]] = OrderedDict()

    def remember(self, epoch: Epoch, last_hash: bytes, tokens: Sequence[int]) -> None:
        """Keep a prompt; `last_hash` is of its last whole block, and one of each is kept."""
        owner = _owner(epoch.namespace)
        prompts = self._owners.setdefault(owner, OrderedDict())
        self._owners.move_to_end(owner)
        replaced = prompts.pop(last_hash, None)
        if replaced is not None:
            self._num_tokens -= len(replaced.tokens)
        prompts[last_hash] = _Prompt(epoch, np.array(tokens, dtype=np.int32))
        self._num_tokens += len(tokens)
        if len(prompts) > PROMPTS_PER_OWNER:
            self._drop_oldest(prompts)
        while self._num_tokens > self._max_tokens:
            oldest, prompts = next(iter(self._owners.items()))
            self._drop_oldest(prompts)
            if not prompts:
                del self._owners[oldest]

    def forget(self, matches: Callable[[Namespace], bool]) -> None:
        """Drop the prompts of the matching namespaces."""
        for owner, prompts in tuple(self._owners.items()):
            for last_hash, prompt in tuple(prompts.items()):
                if matches(prompt.epoch.namespace):
                    del prompts[last_hash]
                    self._num_tokens -= len(prompt.tokens)
            if not prompts:
                del self._owners[owner]

    def explain(self, epoch: Epoch, tokens: Sequence[int], blocks: int, eligible: int) -> Miss:
        """Why only `blocks` whole blocks of `tokens` were found, of the `eligible` ones."""
        prompts = self._owners.get(_owner(epoch.namespace))
        wanted = np.array(tokens, dtype=np.int32)
        closest = self._closest(epoch.namespace, wanted, prompts or {})
        if closest is None:
            return Miss("first")
        if closest.apart:
            return Miss(closest.apart[0])
        if min(closest.common // self._block_size, eligible) > blocks:
            return Miss("evicted" if closest.earlier.epoch.alive else "invalidated")
        at = closest.common
        return Miss(
            "tokens",
            at,
            before=_shown(wanted[max(0, at - SHOWN_TOKENS) : at]),
            expected=_shown(closest.earlier.tokens[at : at + SHOWN_TOKENS]),
            found=_shown(wanted[at : at + SHOWN_TOKENS]),
        )

    def _closest(
        self, namespace: Namespace, tokens: _Tokens, prompts: dict[bytes, _Prompt]
    ) -> _Likeness | None:
        """The prompt with the most whole blocks in common; among equals the one whose namespace
        has the fewest fields apart, then the one that is most alike after the difference too."""
        candidates = [
            _Likeness(p, _common(p.tokens, tokens), _apart(p.epoch.namespace, namespace))
            for p in reversed(prompts.values())
        ]
        best = max((self._rank(c) for c in candidates), default=None)
        equals = [(_alike(c, tokens), c) for c in candidates if self._rank(c) == best]
        alike, closest = max(equals, key=lambda pair: pair[0], default=(0, None))
        return closest if alike else None

    def _rank(self, likeness: _Likeness) -> tuple[int, int]:
        return likeness.common // self._block_size, -len(likeness.apart)

    def _drop_oldest(self, prompts: OrderedDict[bytes, _Prompt]) -> None:
        _, dropped = prompts.popitem(last=False)
        self._num_tokens -= len(dropped.tokens)


def _owner(namespace: Namespace) -> _Owner:
    return namespace.owner_kind, namespace.owner_name


def _apart(earlier: Namespace, later: Namespace) -> tuple[MissReason, ...]:
    if earlier == later:
        return ()
    return tuple(r for name, r in _FIELDS if getattr(earlier, name) != getattr(later, name))


def _common(a: _Tokens, b: _Tokens) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _alike(likeness: _Likeness, tokens: _Tokens) -> int:
    """Tokens that agree: from the front and from the back, or place by place."""
    earlier, length = likeness.earlier.tokens, min(len(likeness.earlier.tokens), len(tokens))
    from_back = _common(earlier[::-1], tokens[::-1])
    in_place = int((earlier[:length] == tokens[:length]).sum())
    return max(min(length, likeness.common + from_back), in_place)


def _shown(tokens: _Tokens) -> tuple[int, ...]:
    return tuple(tokens.tolist())
