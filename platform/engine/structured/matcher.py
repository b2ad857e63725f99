"""One sequence's place in its grammar."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from polyloom.platform.engine.errors import GrammarError
from polyloom.platform.engine.structured.source import reason

Mask = NDArray[np.bool_]


class GrammarMatcher:
    """Follows the tokens that come out of one sequence, and tells what fits after them.

    Every method raises GrammarError once the grammar's limits are hit, and from then on.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        """matcher: in its first state, this sequence's own."""
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def ended(self) -> bool:
        """The text is complete and nothing can follow it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> Mask:
        """`[V]`: tokens that may follow; those that end the text among them where it may end.

        Where the grammar forces the text it is one token: the one that the tokenizer would write.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        unpacked = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return unpacked.view(np.bool_)

    def accept(self, token_id: int) -> None:
        """The sequence goes on with this token."""
        if not self._matcher.consume_token(token_id):
            raise self._error()

    def forced(self, limit: int) -> tuple[int, ...]:
        """The tokens, at most `limit`, that must follow; empty where there is a choice."""
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return tuple(tokens[:limit])

    def fitting(self, draft: Sequence[int]) -> int:
        """How many leading tokens of `draft` the grammar takes."""
        fit = self._matcher.validate_tokens(list(draft))
        self._check()
        return fit

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._error()

    def _error(self) -> GrammarError:
        return GrammarError(f"the grammar gave up: {reason(self._matcher.get_error())}")
