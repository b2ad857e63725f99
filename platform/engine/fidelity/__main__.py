"""The validator process: `python -m polyloom.platform.engine.fidelity`, driven by `client`.

Reads settings, then checks, from standard input, and ends when that does: a parent that dies takes
its worker with it. What libraries print goes to standard error.
"""

import logging
import os
import sys

import msgspec
import torch

from polyloom.platform.engine.fidelity.check import FidelityCheck
from polyloom.platform.engine.fidelity.errors import UncheckableError
from polyloom.platform.engine.fidelity.frames import pack, read_frame
from polyloom.platform.engine.fidelity.messages import (
    Answer,
    Check,
    FidelitySettings,
    Uncheckable,
)

NICENESS = 10
"""A check that takes a core from the engine's threads makes every step of every tenant slower."""


def main() -> None:
    """Answer checks until the input ends, behind whoever serves requests."""
    os.nice(NICENESS)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    first = read_frame(requests)
    if first is None:
        return
    settings = msgspec.msgpack.decode(first, type=FidelitySettings)
    torch.set_num_threads(settings.threads)
    check = FidelityCheck(settings)
    while (frame := read_frame(requests)) is not None:
        answers.write(pack(_answer(check, msgspec.msgpack.decode(frame, type=Check))))
        answers.flush()


def _answer(check: FidelityCheck, request: Check) -> Answer:
    try:
        return check.run(request)
    except UncheckableError as error:
        return Uncheckable(str(error))


if __name__ == "__main__":
    main()
