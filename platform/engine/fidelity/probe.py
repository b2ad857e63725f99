"""What both models are asked: fixed token sequences."""

import random
from pathlib import Path

from tokenizers import Tokenizer

_TEXTS = (
    "The engineer opened the ticket, read the error twice, and decided to roll back the release.",
    "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([3, 1, 4, 1, 5]))",
    'Frage: Wie heißt die Hauptstadt von Japan? Antwort: 東京. 1 + 2 = 3; {"ok": true}',
)
_LENGTH = 48
_SEED = 20


def probe_sequences(model_folder: Path, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """A few texts in the base's tokens, and one sequence drawn over the whole vocabulary.

    A base without a fast tokenizer is asked the drawn sequences only. Each has 2 to 48 tokens.
    """
    drawn = random.Random(_SEED)
    sequences = [tuple(drawn.randrange(vocab_size) for _ in range(_LENGTH))]
    file = model_folder / "tokenizer.json"
    if file.is_file():
        tokenizer = Tokenizer.from_file(str(file))
        for text in _TEXTS:
            ids = [i for i in tokenizer.encode(text).ids if i < vocab_size][:_LENGTH]
            if len(ids) > 1:
                sequences.append(tuple(ids))
    return tuple(sequences)
