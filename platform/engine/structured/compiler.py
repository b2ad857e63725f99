"""Grammars to matchers, on a thread beside the step loop.

The thread runs llguidance and tokenizers only, never an operator of torch: a team of OpenMP threads
of its own would slow the step loop's.
"""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256

from llguidance import LLMatcher, LLTokenizer

from polyloom.platform.engine.errors import GrammarError
from polyloom.platform.engine.structured.matcher import GrammarMatcher
from polyloom.platform.engine.structured.source import LIMITS, llguidance_source, reason
from polyloom.routing.grammar import Grammar, Vocabulary

MAX_GRAMMARS = 256
MAX_VOCABULARIES = 16


class CompiledGrammar:
    """A grammar on one vocabulary; hands out matchers in their first state."""

    def __init__(self, prototype: LLMatcher, vocab_size: int) -> None:
        self._prototype = prototype
        self._vocab_size = vocab_size

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._prototype.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Compiles each grammar once and keeps those used last. Called from the step loop's thread."""

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: columns of the model's logits."""
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._vocabularies: OrderedDict[tuple[str, tuple[int, ...]], LLTokenizer] = OrderedDict()

    def compile(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """The compiled grammar, or GrammarError, soon or at once."""
        future = self._compiled.pop(grammar, None)
        if future is None:
            future = self._thread.submit(self._compile, grammar)
        self._compiled[grammar] = future  # last used is last
        while len(self._compiled) > MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return future

    def warm_up(self, vocabulary: Vocabulary) -> None:
        """Load a vocabulary before somebody waits for it: that stops the step loop for a moment."""
        self._thread.submit(self._tokenizer, vocabulary)

    def close(self) -> None:
        """End the thread once it is through with what it is at."""
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        source = llguidance_source(grammar.kind, grammar.text)
        tokenizer = self._tokenizer(grammar.vocabulary)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(reason(matcher.get_error()))
        return CompiledGrammar(matcher, self._vocab_size)

    def _tokenizer(self, vocabulary: Vocabulary) -> LLTokenizer:
        """In the thread alone."""
        key = (vocabulary.digest, vocabulary.eos_ids)
        tokenizer = self._vocabularies.pop(key, None)
        if tokenizer is None:
            tokenizer = _load(vocabulary, self._vocab_size)
        self._vocabularies[key] = tokenizer
        while len(self._vocabularies) > MAX_VOCABULARIES:
            self._vocabularies.popitem(last=False)
        return tokenizer


def _load(vocabulary: Vocabulary, vocab_size: int) -> LLTokenizer:
    """Raises GrammarError where the folder does not hold the tokenizer of that digest, or one that
    grammars cannot be laid over."""
    from transformers import AutoTokenizer  # slow to import, and not every engine needs it

    try:
        loaded = AutoTokenizer.from_pretrained(vocabulary.folder, local_files_only=True)
        backend = loaded.backend_tokenizer
        backend.no_padding()  # as the API process reads it
        backend.no_truncation()
        described: str = backend.to_str()
    except Exception as error:  # whatever transformers meets in a folder
        raise GrammarError(f"the tokenizer cannot be loaded: {type(error).__name__}") from error
    if "sha256:" + sha256(described.encode()).hexdigest() != vocabulary.digest:
        raise GrammarError("the tokenizer is not the one that the prompt was written with")
    n_vocab, eos = max(vocab_size, len(loaded)), list(vocabulary.eos_ids)
    try:
        return LLTokenizer(described, n_vocab=n_vocab, eos_token=eos)
    except Exception as error:  # for a decoder that it does not know, ValueError among others
        raise GrammarError(f"grammars cannot be used with this tokenizer: {error}") from error
