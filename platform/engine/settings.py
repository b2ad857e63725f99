"""What an engine process is told when it starts."""

import math
from pathlib import Path
from typing import Literal

import msgspec

from polyloom.routing.grammar import Vocabulary

DrafterName = Literal["ngram", "draft_head", "grammar"]

_MAX_SOCKET_PATH = 103  # bytes of sockaddr_un.sun_path, less ZeroMQ's and the terminator


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: its base, its memory, its limits, its socket. Sent as JSON on standard input.

    model_folder: the base in Hugging Face format.  base_digest: its exact identity.
    address: `ipc://` and a path in a folder that only this user can enter.
    kv_memory, adapter_memory: bytes.  max_model_len: None for what the base allows, in any case no
    more than the KV memory holds.  threads: of torch's operators.
    itl_target: seconds between two tokens of an answer that chunks of prompts are sized for.
    implementation: `reference` forces plain torch everywhere; `cuda` insists on the CUDA kernels,
    which `auto` takes on a CUDA device.
    vocabulary: of the grammars to expect, loaded at the start; others when they come.
    prefix_cache: reuse K and V of prompts that begin alike; off, nothing is looked up or kept.
    kv_dtype: `int8` stores K and V in 8 bits with scales, where the CUDA kernels run; `auto` as
    `dtype`. The cache of a draft model is always as `dtype`.
    drafters: who may guess next tokens, where that pays; none: every token takes a step.
    draft_model: folder of a smaller model of the same tokenizer that drafts too; its cache takes a
    quarter of `kv_memory` more.
    """

    model_folder: str
    base_name: str
    base_digest: str
    address: str
    kv_memory: int
    adapter_memory: int
    threads: int
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    kv_dtype: Literal["auto", "int8"] = "auto"
    block_size: int = 16
    token_budget: int = 512
    max_running: int = 64
    queue_limit: int = 1024
    max_model_len: int | None = None
    max_rank: int = 256
    itl_target: float = 0.1
    implementation: Literal["auto", "reference", "cuda"] = "auto"
    vocabulary: Vocabulary | None = None
    prefix_cache: bool = True
    drafters: tuple[DrafterName, ...] = ("ngram", "draft_head", "grammar")
    draft_model: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "kv_memory",
            "adapter_memory",
            "threads",
            "block_size",
            "token_budget",
            "max_running",
            "queue_limit",
            "max_rank",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.itl_target < math.inf:
            raise ValueError(f"itl_target must be finite and above 0, not {self.itl_target}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if not self.address.startswith("ipc://"):
            raise ValueError(f"address must be an ipc:// path, not {self.address!r}")
        if len(str(self.socket_path).encode()) > _MAX_SOCKET_PATH:
            raise ValueError(
                f"address is longer than the {_MAX_SOCKET_PATH} bytes a socket's path may have: "
                f"{self.address}"
            )

    @property
    def stored_dtype(self) -> str:
        """What K and V are stored as."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def socket_path(self) -> Path:
        return Path(self.address.removeprefix("ipc://"))
