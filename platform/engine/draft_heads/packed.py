"""A shared draft head on the engine's own ops, with deltas gathered per row."""

import torch
from torch.nn.functional import pad

from polyloom.adapters.base_layout import ModuleGroup
from polyloom.adapters.draft_heads.checkpoint import NORMS, DraftHead, draft_vocabulary
from polyloom.adapters.segments import LoraBatch
from polyloom.adapters.weights import BaseWeights
from polyloom.platform.engine.kernels.ops import EngineOps, PackedLinear
from polyloom.platform.engine.model.decoder import LoraHook

_ROWS_AT_ONCE = 4096
_HELD = ("fc", "gate_up_proj", "down_proj", *NORMS)


class PackedHead:
    """The weights of one shared head, and a step of it. Holds no state of any sequence."""

    def __init__(
        self,
        head: DraftHead,
        base: BaseWeights,
        ops: EngineOps,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """head: a shared one. May run on any thread."""
        tensors, config = head.tensors, head.config
        self.config = config
        self.target_ids = draft_vocabulary(tensors)
        self._ops = ops
        self._eps = config.rms_norm_eps
        rows = output_rows(base, self.target_ids, config.vocab_size)
        held = {name: tensors[f"{name}.weight"] for name in _HELD} | {"lm_head": rows}
        placed = {name: t.to(device, dtype).contiguous() for name, t in held.items()}
        self._fc = ops.pack_linear(placed["fc"])
        self._gate_up = ops.pack_linear(placed["gate_up_proj"])
        self._down = ops.pack_linear(placed["down_proj"])
        self._lm_head = ops.pack_linear(placed["lm_head"])
        self._hidden_norm = placed["hidden_norm"]
        self._embed_norm = placed["embed_norm"]
        self._mlp_norm = placed["mlp_norm"]
        self._norm = placed["norm"]

    @torch.inference_mode()
    def step(
        self, features: torch.Tensor, embeddings: torch.Tensor, lora: LoraBatch, layers: LoraHook
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next features `[N, hidden]`, and fp32 logits of the token that follows: `[N, V]` of
        the draft vocabulary, or `[N, V + adapter_vocab]` if a row has a delta. A row's columns
        beyond its own vocabulary mean nothing.

        features, embeddings: `[N, hidden]`, of the last token's predecessor (the state that it was
        sampled from) and of the last token.  lora: the N rows' deltas.
        """
        ops = self._ops
        fused = torch.cat(
            (
                ops.rms_norm(features, self._hidden_norm, self._eps),
                ops.rms_norm(embeddings, self._embed_norm, self._eps),
            ),
            dim=1,
        )
        x = self._linear(ModuleGroup.FUSE, self._fc, fused, lora, layers)
        normed = ops.rms_norm(x, self._mlp_norm, self._eps)
        gate_up = self._linear(ModuleGroup.GATE_UP, self._gate_up, normed, lora, layers)
        out = self._linear(ModuleGroup.DOWN, self._down, ops.silu_mul(gate_up), lora, layers)
        normed = ops.add_rms_norm(out, x, self._norm, self._eps)
        logits = ops.linear(normed, self._lm_head)
        if not lora.empty:
            logits = pad(logits, (0, self.config.adapter_vocab_size))
            layers.apply(ModuleGroup.HEAD, 0, normed, logits, lora)
        return x, logits.float()

    def _linear(
        self,
        group: ModuleGroup,
        packed: PackedLinear,
        x: torch.Tensor,
        lora: LoraBatch,
        layers: LoraHook,
    ) -> torch.Tensor:
        y = self._ops.linear(x, packed)
        if not lora.empty:
            layers.apply(group, 0, x, y, lora)
        return y


def output_rows(base: BaseWeights, target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The base's output head on these tokens' rows: `[N, hidden]` fp32; in order of the ids."""
    rows: torch.Tensor | None = None
    for start in range(0, vocab_size, _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, vocab_size)
        wanted = (target_ids >= start) & (target_ids < end)
        if wanted.any():
            part = base.rows(ModuleGroup.HEAD, 0, start, end - start)
            if rows is None:
                rows = part.new_empty(len(target_ids), part.shape[1])
            rows[wanted] = part[target_ids[wanted] - start]
    if rows is None:
        raise ValueError("no target ids")
    return rows
