"""The grammars of the engine's sequences, from a sequence's arrival to its end."""

import logging
from concurrent.futures import Future

from polyloom.platform.engine.errors import GrammarError
from polyloom.platform.engine.structured.compiler import CompiledGrammar, GrammarCompiler
from polyloom.platform.engine.structured.matcher import GrammarMatcher
from polyloom.routing.grammar import Vocabulary
from polyloom.routing.scheduler.sequence import Sequence

logger = logging.getLogger("polyloom.engine")


def _as_grammar_error(error: BaseException) -> GrammarError:
    """Whatever compiling one sequence's grammar raised ends that sequence, not the step loop."""
    if isinstance(error, GrammarError):
        return error
    logger.error("a grammar could not be compiled", exc_info=error)
    return GrammarError(f"the grammar cannot be compiled: {type(error).__name__}")


class SequenceGrammars:
    """A matcher for each sequence that has a grammar. Called from the step loop's thread.

    A matcher follows its sequence's output alone, so a preemption changes nothing for it.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._compiling: dict[str, tuple[Sequence, Future[CompiledGrammar]]] = {}
        self._matchers: dict[str, GrammarMatcher] = {}

    def expect(self, vocabulary: Vocabulary) -> None:
        """Grammars on this vocabulary will come."""
        self._compiler.warm_up(vocabulary)

    def open(self, sequence: Sequence) -> None:
        """A sequence is queued. It is `held` until its grammar, if it has one, is compiled."""
        grammar = sequence.request.grammar
        if grammar is None:
            return
        sequence.held = True
        self._compiling[sequence.sequence_id] = (sequence, self._compiler.compile(grammar))

    def poll(self) -> list[tuple[Sequence, GrammarError]]:
        """Let go of the sequences whose grammars are compiled; those whose cannot be, and why."""
        failed: list[tuple[Sequence, GrammarError]] = []
        for sequence_id, (sequence, future) in tuple(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[sequence_id]
            error = future.exception()
            if error is None:
                self._matchers[sequence_id] = future.result().matcher()
                sequence.held = False
            else:
                failed.append((sequence, _as_grammar_error(error)))
        return failed

    def matcher(self, sequence_id: str) -> GrammarMatcher | None:
        """None for a sequence without a grammar."""
        return self._matchers.get(sequence_id)

    def ended(self, sequence_id: str) -> bool:
        """Its text is complete, and nothing but a token that ends it could follow."""
        matcher = self._matchers.get(sequence_id)
        return matcher is not None and matcher.ended

    def close(self, sequence_id: str) -> None:
        """A sequence has ended, wherever it was."""
        self._compiling.pop(sequence_id, None)
        self._matchers.pop(sequence_id, None)

    def stop(self) -> None:
        """End the compiler's thread."""
        self._compiler.close()
