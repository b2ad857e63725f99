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
_PROBE = """
import json, re, sys
pattern, names = json.load(sys.stdin)
forms = pattern, rf"(.*\\.)?({pattern})$", rf"(?:^|.*?\\.){pattern}\\.(?P<idx>\\d+)\\."
try:
    for form in forms:
        compiled = re.compile(form)
        for name in names:
            compiled.fullmatch(name)
            compiled.match(name)
except (re.error, RecursionError, OverflowError) as error:
    print(error)
"""


def check_pattern(field: str, pattern: str, names: Sequence[str], seconds: float = 5.0) -> None:
    """Refuse a pattern that does not compile, or that does not end on `names` within `seconds`.

    Raises InvalidAdapterError naming `field`.
    """
    if len(pattern) > _MAX_LENGTH:
        raise InvalidAdapterError(field, f"has a pattern of over {_MAX_LENGTH} characters")
    if _PLAIN.fullmatch(pattern):
        return
    try:
        probe = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE],
            input=json.dumps([pattern, list(names)]),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
    except subprocess.TimeoutExpired:
        message = "has a pattern that takes too long to match"
        raise InvalidAdapterError(field, message) from None
    except subprocess.CalledProcessError as error:
        raise InvalidAdapterError(field, "has a pattern that cannot be matched") from error
    if probe.stdout:
        raise InvalidAdapterError(field, f"is not a pattern: {probe.stdout.strip()}")
