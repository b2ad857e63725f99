"""How the engine shares the processors with the processes that wait for its answers."""

import ctypes
import logging
import os
import struct
import sys

logger = logging.getLogger("polyloom.engine")

SLICE_SECONDS = 0.1  # the longest that Linux takes
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of the system call
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, …
_SCHED_OTHER = 0


def let_others_interrupt() -> bool:
    """Let whoever wakes up run at once beside this process's threads; False where Linux can't.

    A step keeps all processors busy without a pause, and the scheduler lets a running thread finish
    its time slice before one that has just woken up with a slice as long: an API process, its
    reader and the client each wait for that before a first token is seen. A thread with a shorter
    slice interrupts one with a longer (EEVDF, since Linux 6.12), so the engine asks for the longest.
    It loses no share by that. To be called before the threads that compute exist, which inherit it,
    and after those that only carry bytes.
    """
    number = _SCHED_SETATTR.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        return False
    attributes = _SCHED_ATTR.pack(
        _SCHED_ATTR.size, _SCHED_OTHER, 0, os.getpriority(os.PRIO_PROCESS, 0), 0,
        int(SLICE_SECONDS * 1e9), 0, 0,
    )  # fmt: skip
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, 0, attributes, 0) != 0:
        logger.warning("no long time slices: %s", os.strerror(ctypes.get_errno()))
        return False
    return True
