"""What one reader has not read yet of its sequence."""

import asyncio

from polyloom.platform.engine.errors import EngineError, SlowReaderError
from polyloom.platform.engine.messages import Finished, Tokens


class TokenStream:
    """Between the client's reader task, which never waits, and one consumer, which may be slow.

    Unread tokens are handed over merged into one `Tokens`. More than `limit` of them end the
    stream with SlowReaderError.
    """

    def __init__(self, sequence_id: str, limit: int) -> None:
        self._sequence_id = sequence_id
        self._limit = limit
        self._unread: list[Tokens] = []
        self._num_unread = 0
        self._last: Finished | None = None
        self._error: EngineError | None = None
        self._changed = asyncio.Event()

    @property
    def over(self) -> bool:
        """The engine has ended the sequence, or was told to: there is nothing to abort."""
        return self._last is not None or self._error is not None

    def put(self, tokens: Tokens) -> bool:
        """Add tokens; False when they are too many and the sequence must be aborted.

        Once a stream has failed, tokens that were still on their way are dropped.
        """
        if self._error is not None:
            return True
        self._num_unread += len(tokens.token_ids)
        if self._num_unread > self._limit:
            self._unread.clear()
            self.fail(SlowReaderError(self._sequence_id, self._limit))
            return False
        self._unread.append(tokens)
        self._changed.set()
        return True

    def finish(self, last: Finished) -> None:
        self._last = last
        self._changed.set()

    def fail(self, error: EngineError) -> None:
        """End with `error`, unless the end is known already. Unread tokens come first."""
        if self._last is None and self._error is None:
            self._error = error
            self._changed.set()

    async def next(self) -> Tokens | Finished:
        """All unread tokens, else the end. Raises what the stream failed with."""
        while True:
            if self._unread:
                return self._take()
            if self._error is not None:
                raise self._error
            if self._last is not None:
                return self._last
            self._changed.clear()
            await self._changed.wait()

    def _take(self) -> Tokens:
        unread, self._unread, self._num_unread = self._unread, [], 0
        if len(unread) == 1:
            return unread[0]
        return Tokens(
            self._sequence_id,
            tuple(token for part in unread for token in part.token_ids),
            tuple(entry for part in unread for entry in part.logprobs),
            tuple(entry for part in unread for entry in part.prompt_logprobs),
        )
