"""Whether a draft model reads and writes the base's own tokens."""

import json
from pathlib import Path
from typing import Any

from polyloom.platform.engine.errors import EngineStartError

_FILE = "tokenizer.json"


def check_same_tokenizer(base: Path, draft: Path) -> None:
    """Raises EngineStartError naming the draft model's folder and what differs.

    The ids' texts and the merges must agree; what only writes prompts (templates, added prefixes)
    may not.
    """
    mine, other = _described(base), _described(draft)
    for part in ("model", "added_tokens"):
        if mine.get(part) != other.get(part):
            raise EngineStartError(
                f"draft_model {str(draft)!r} has another tokenizer than the base: "
                f"{part!r} of its {_FILE} differs"
            )


def _described(folder: Path) -> dict[str, Any]:
    try:
        described = json.loads((folder / _FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise EngineStartError(f"draft_model: {folder / _FILE} cannot be read: {error}") from error
    if not isinstance(described, dict):
        raise EngineStartError(f"draft_model: {folder / _FILE} is no JSON object")
    return described
