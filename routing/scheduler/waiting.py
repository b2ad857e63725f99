"""The engine's one waiting queue."""

from collections import OrderedDict
from collections.abc import Iterator

from polyloom.routing.scheduler.errors import QueueFullError
from polyloom.routing.scheduler.sequence import Sequence


class WaitingQueue:
    """Sequences that have no blocks, in the order in which they may be admitted.

    The order is that of arrival, preempted sequences first. `candidates` is the only place that
    decides it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._sequences: OrderedDict[str, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def append(self, sequence: Sequence) -> None:
        """Queue a new arrival.

        Raises:
            QueueFullError: `limit` sequences wait already.
        """
        if len(self._sequences) >= self.limit:
            raise QueueFullError(self.limit)
        self._sequences[sequence.sequence_id] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence before all others; the limit does not apply to it."""
        self._sequences[sequence.sequence_id] = sequence
        self._sequences.move_to_end(sequence.sequence_id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        del self._sequences[sequence.sequence_id]

    def candidates(self) -> Iterator[Sequence]:
        """All of them in admission order; a snapshot, so the queue may change meanwhile."""
        return iter(tuple(self._sequences.values()))
