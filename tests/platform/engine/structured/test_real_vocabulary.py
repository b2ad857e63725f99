"""Grammars on SmolLM2's own tokenizer."""

import json
from collections.abc import Iterator
from hashlib import sha256

import numpy as np
import pytest
from transformers import AutoTokenizer

from polyloom.platform.engine.structured.compiler import GrammarCompiler
from polyloom.routing.grammar import Grammar, Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "category": {"enum": ["billing", "bug"]},
        "summary": {"type": "string"},
        "count": {"type": "integer"},
    },
    "required": ["category", "summary", "count"],
    "additionalProperties": False,
}
ANSWER = '{"category": "billing", "summary": "Grüße: \\"zweimal\\" 🙂", "count": 12}'


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2.folder)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(49152)
    yield compiler
    compiler.close()


@pytest.fixture
def matcher(smollm2, tokenizer, compiler):
    digest = "sha256:" + sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    vocabulary = Vocabulary(folder=str(smollm2.folder), digest=digest, eos_ids=(0, 2))
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMA), vocabulary=vocabulary)
    return compiler.compile(grammar).result(60).matcher()


def test_it_takes_what_the_tokenizer_writes(matcher, tokenizer) -> None:
    ids = tokenizer.encode(ANSWER)
    assert matcher.fitting(ids) == len(ids)
    forced = 0
    for position, token in enumerate(ids):
        ahead = matcher.forced(32)
        assert list(ahead) == ids[position : position + len(ahead)]
        forced += bool(ahead)
        allowed = matcher.allowed()
        assert allowed.shape == (49152,)
        assert allowed[token]
        assert not (allowed[0] or allowed[2])
        matcher.accept(token)
    assert forced > len(ids) / 3
    assert matcher.ended
    assert np.flatnonzero(matcher.allowed()).tolist() == [0, 2]
