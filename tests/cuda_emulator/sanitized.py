"""The kernels under the address sanitiser, which sees what a guard page does not: an access between
two allocations, or before one.

    python -m tests.cuda_emulator.sanitized [NAME OF A MUTATION]

Starts itself anew with the sanitiser's library loaded first. Exit status 0: nothing was found.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from polyloom.kvcache.kernels.cuda import stand_in
from tests.cuda_emulator import lora_cases
from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.mutations import (
    MUTATIONS,
    MutatedDevice,
    run_attention,
    run_eight_bits,
    run_lora,
    run_sampling,
)

NAME = "tests.cuda_emulator.sanitized"
CHECKS = ("-fsanitize=address",)


def run(mutation: str | None = None) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with or without a planted fault."""
    command = [sys.executable, "-m", NAME, "--inside"]
    libraries = [_library(name) for name in ("libasan.so", "libstdc++.so")]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONMALLOC": "malloc",
    }
    arguments = [] if mutation is None else [mutation]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, env=environment
    )


def _library(name: str) -> str:
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def _inside(arguments: Sequence[str]) -> None:
    lora_cases.guarded = torch.clone  # memory of the sanitiser, with its red zones
    planted = [one for one in MUTATIONS if one.name in arguments]
    device = MutatedDevice(planted[0], CHECKS) if planted else EmulatedDevice(CHECKS)
    with stand_in("cpu", device):
        every = (run_lora, run_attention, run_eight_bits, run_sampling)
        for work in [planted[0].run] if planted else every:
            work()


if __name__ == "__main__":
    if "--inside" in sys.argv:
        _inside(sys.argv[1:])
    else:
        done = run(*sys.argv[1:2])
        print(done.stdout, done.stderr, sep="")
        sys.exit(done.returncode)
