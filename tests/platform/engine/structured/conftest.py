"""Grammars on the tiny Llama's vocabulary."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from polyloom.platform.engine.structured.compiler import GrammarCompiler
from polyloom.platform.engine.structured.matcher import GrammarMatcher
from polyloom.routing.grammar import Grammar, GrammarKind, Vocabulary
from tests.conftest import VOCABULARY

MakeGrammar = Callable[[GrammarKind, str], Grammar]


@pytest.fixture(scope="session")
def tokenizer(tiny_llama_folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny_llama_folder)


@pytest.fixture(scope="session")
def vocabulary(tiny_llama_folder: Path, tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    digest = "sha256:" + sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    return Vocabulary(folder=str(tiny_llama_folder), digest=digest, eos_ids=(2,))


@pytest.fixture(scope="session")
def make_grammar(vocabulary: Vocabulary) -> MakeGrammar:
    return lambda kind, text: Grammar(kind=kind, text=text, vocabulary=vocabulary)


@pytest.fixture(scope="session")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(VOCABULARY)
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def matcher_of(
    compiler: GrammarCompiler, make_grammar: MakeGrammar
) -> Callable[[GrammarKind, str], GrammarMatcher]:
    return lambda kind, text: compiler.compile(make_grammar(kind, text)).result(30).matcher()
