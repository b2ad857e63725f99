"""Finds stop strings in a text that arrives in pieces."""


class StopStrings:
    """Releases text that can no longer be part of a stop string, and cuts at the first that is
    complete.

    The first stop string to be *complete* wins (of two that end together, the longer), so the
    answer does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to show; nothing after a match."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        found = self._first_complete()
        if found is not None:
            start, self.matched = found
            released, self._held = self._held[:start], ""
            return released
        keep = self._longest_open()
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def finish(self) -> str:
        """The text that was held back for a match that never came."""
        released, self._held = self._held, ""
        return released

    def _first_complete(self) -> tuple[int, str] | None:
        hits = ((self._held.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), start, stop) for start, stop in hits if start >= 0]
        return min(ends)[1:] if ends else None

    def _longest_open(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
