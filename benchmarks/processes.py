"""What the server's processes hold, read from the operating system."""

from dataclasses import dataclass

import psutil

ENGINE_MODULE = "polyloom.platform.engine.process"


@dataclass(frozen=True)
class Held:
    """Of the API process and its engine together."""

    rss: int
    files: int
    threads: int


def engine_process(server_pid: int) -> psutil.Process:
    """The engine that belongs to a server. Raises LookupError if there is none."""
    for child in psutil.Process(server_pid).children(recursive=True):
        if ENGINE_MODULE in " ".join(child.cmdline()):
            return child
    raise LookupError(f"no engine under process {server_pid}")


def held(server_pid: int) -> Held:
    """The validator is left out: it comes and goes with uploads."""
    processes = (psutil.Process(server_pid), engine_process(server_pid))
    return Held(
        rss=sum(process.memory_info().rss for process in processes),
        files=sum(process.num_fds() for process in processes),
        threads=sum(process.num_threads() for process in processes),
    )
