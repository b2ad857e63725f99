"""Regular expressions in a config are a stranger's code: prove that they end before PEFT runs them.

PEFT matches `target_modules`, `exclude_modules` and the pattern keys with `re`, which cannot be
interrupted and holds the interpreter. The same matches are first made in a process that can be
killed; matching is deterministic, so what ended there ends here.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from polyloom.adapters.errors import InvalidAdapterError

_PLAIN = re.compile(r"[\w.-]*", re.ASCII)
_MAX_LENGTH = 4_096
_MAX_PATTERNS = 2_000
_WHOLE_NAME = "%s"
_LAST_COMPONENTS = r"(.*\.)?(%s)$"
_FORMS = {
    "target_modules": _WHOLE_NAME,
    "exclude_modules": _WHOLE_NAME,
    "rank_pattern": _LAST_COMPONENTS,
    "alpha_pattern": _LAST_COMPONENTS,
    "layers_pattern": r"(?:^|.*?\.)%s\.(?P<idx>\d+)\.",
}
"""How PEFT embeds a field's patterns (`check_target_module_exists`, `get_pattern_key`)."""

_PROBE = """
import json, re, sys
form, patterns, names = json.load(sys.stdin)
for pattern in patterns:
    try:
        compiled = re.compile(form % pattern)
        for name in names:
            compiled.fullmatch(name)
            compiled.match(name)
    except (re.error, RecursionError, OverflowError) as error:
        sys.exit(f"{pattern!r}: {error}")
"""


def check_patterns(
    field: str, patterns: Sequence[str], names: Sequence[str], seconds: float = 5.0
) -> None:
    """Refuse patterns that do not compile, or that do not end on `names` within `seconds`.

    Raises InvalidAdapterError naming `field`.
    """
    if len(patterns) > _MAX_PATTERNS:
        raise InvalidAdapterError(field, f"has over {_MAX_PATTERNS} patterns")
    if any(len(pattern) > _MAX_LENGTH for pattern in patterns):
        raise InvalidAdapterError(field, f"has a pattern of over {_MAX_LENGTH} characters")
    risky = [pattern for pattern in patterns if not _PLAIN.fullmatch(pattern)]
    if not risky:
        return
    try:
        probe = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE],
            input=json.dumps([_FORMS[field], risky, list(names)]),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = "has a pattern that takes too long to match"
        raise InvalidAdapterError(field, message) from None
    if probe.returncode != 0:
        said = probe.stderr.strip().splitlines()
        message = said[-1] if said else "it cannot be matched"
        raise InvalidAdapterError(field, f"is no pattern: {message}")
