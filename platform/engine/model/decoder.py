"""The one decoder: packed tokens in, hidden states out, whatever the family."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from polyloom.adapters.base_layout import ModuleGroup
from polyloom.adapters.segments import LoraBatch
from polyloom.kvcache.attention import PagedAttention
from polyloom.kvcache.batch import AttentionBatch
from polyloom.platform.engine.kernels.ops import EngineOps, PackedLinear
from polyloom.platform.engine.model.config import Activation, DecoderConfig, RopeConfig
from polyloom.platform.engine.model.rope import rope_tables
from polyloom.platform.engine.model.weights import FusedWeights


class LoraHook(Protocol):
    """What the decoder asks of the adapters after each fused linear (`adapters.layers`)."""

    def apply(
        self,
        group: ModuleGroup,
        layer: int,
        x: torch.Tensor,
        y: torch.Tensor,
        batch: LoraBatch,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Change y `[T, out]` in place as each token's revision does for input x `[T, in]`.

        y is `x Wᵀ + bias`.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's packed weights. next_norm: the norm after this layer, the last one's final."""

    index: int
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp_out_norm: torch.Tensor | None
    next_norm: torch.Tensor
    rope: int | None
    window: int | None


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer of one forward shares. lora is None where no token has an adapter."""

    batch: AttentionBatch
    attention: PagedAttention
    rotations: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    lora: LoraBatch | None
    hook: LoraHook


class Decoder:
    """A base's weights, and the forward pass over them. Holds no state of any sequence.

    Shapes below: T packed tokens of all sequences of a step, without padding.
    """

    def __init__(
        self, config: DecoderConfig, weights: FusedWeights, ops: EngineOps, dtype: torch.dtype
    ) -> None:
        """Packs all weights, tensor by tensor, and checks that the checkpoint holds no others.

        Positions up to `config.max_model_len` can be computed.  Raises CheckpointError.
        """
        self.config = config
        self._ops = ops
        self._rms_norm = partial(ops.rms_norm, eps=config.norm_eps, plus_one=config.norm_plus_one)
        self._add_rms_norm = partial(
            ops.add_rms_norm, eps=config.norm_eps, plus_one=config.norm_plus_one
        )
        self._activate = ops.silu_mul if config.activation is Activation.SILU else ops.gelu_tanh_mul
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._embedding_scale = torch.tensor(config.embedding_scale).to(dtype).item()
        ropes = tuple(dict.fromkeys(layer.rope for layer in config.layers if layer.rope))
        self._embedding = ops.pack_linear(weights.embedding())
        self._first_norm = weights.layer_norm(0, "input_layernorm")
        self._device = self._first_norm.device
        self._rope_tables = tuple(self._rope_table(rope, dtype) for rope in ropes)
        self._layers = self._pack_layers(weights, ropes)
        self._head = (
            self._embedding if config.tied_head else self._pack(weights, ModuleGroup.HEAD, 0)
        )
        weights.check_all_read()

    def _pack_layers(
        self, weights: FusedWeights, ropes: tuple[RopeConfig, ...]
    ) -> tuple[_Layer, ...]:
        config, layers = self.config, []
        sandwich, qk_norm = config.sandwich_norms, config.qk_norm
        mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        for i, layer in enumerate(config.layers):
            last = i + 1 == config.num_layers
            layers.append(
                _Layer(
                    index=i,
                    qkv=self._pack(weights, ModuleGroup.QKV, i),
                    out=self._pack(weights, ModuleGroup.OUT, i),
                    gate_up=self._pack(weights, ModuleGroup.GATE_UP, i),
                    down=self._pack(weights, ModuleGroup.DOWN, i),
                    query_norm=weights.head_norm(i, "q_norm") if qk_norm else None,
                    key_norm=weights.head_norm(i, "k_norm") if qk_norm else None,
                    attention_out_norm=(
                        weights.layer_norm(i, "post_attention_layernorm") if sandwich else None
                    ),
                    mlp_norm=weights.layer_norm(i, mlp_norm),
                    mlp_out_norm=(
                        weights.layer_norm(i, "post_feedforward_layernorm") if sandwich else None
                    ),
                    next_norm=(
                        weights.final_norm()
                        if last
                        else weights.layer_norm(i + 1, "input_layernorm")
                    ),
                    rope=None if layer.rope is None else ropes.index(layer.rope),
                    window=layer.window,
                )
            )
        return tuple(layers)

    def _rope_table(
        self, rope: RopeConfig, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rope_tables(rope, self.config.max_model_len, dtype)
        return cos.to(self._device), sin.to(self._device)

    def _pack(self, weights: FusedWeights, group: ModuleGroup, layer: int) -> PackedLinear:
        fused = weights.linear(group, layer)
        return self._ops.pack_linear(fused.weight, fused.bias)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What the first layer reads for token_ids `[N]` int64: `[N, hidden]`."""
        embedded = self._ops.embedding(token_ids, self._embedding)
        return embedded if self._embedding_scale == 1.0 else embedded.mul_(self._embedding_scale)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        lora: LoraBatch,
        attention: PagedAttention,
        lora_layers: LoraHook,
    ) -> torch.Tensor:
        """Final-normed hidden states `[T, hidden]` of token_ids `[T]` int64; appends their K and V.

        The result is what the head reads, and so what a draft head reads as the target's features.
        """
        positions = batch.positions.to(self._device, non_blocking=True)
        step = _Step(
            batch=batch,
            attention=attention,
            rotations=tuple(
                (cos.index_select(0, positions), sin.index_select(0, positions))
                for cos, sin in self._rope_tables
            ),
            lora=None if lora.empty else lora,
            hook=lora_layers,
        )
        residual = self.embed(token_ids)
        hidden = self._rms_norm(residual, self._first_norm)
        for layer in self._layers:
            hidden = self._attend(layer, hidden, step)
            hidden = self._add_rms_norm(hidden, residual, layer.mlp_norm)
            hidden = self._feed_forward(layer, hidden, step)
            hidden = self._add_rms_norm(hidden, residual, layer.next_norm)
        return hidden

    @torch.inference_mode()
    def logits(
        self,
        hidden: torch.Tensor,
        lora: LoraBatch,
        lora_layers: LoraHook,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """fp32 `[N, vocab]` of N rows of `forward`'s result, written to `into` where it is given;
        lora describes those rows."""
        logits = self._ops.linear(hidden, self._head)
        if not lora.empty:
            lora_layers.apply(ModuleGroup.HEAD, 0, hidden, logits, lora)
        logits = logits.float() if into is None else into.copy_(logits)
        if self.config.logits_divisor != 1.0:
            logits.div_(self.config.logits_divisor)
        cap = self.config.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _attend(self, layer: _Layer, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        config = self.config
        qkv = self._linear(ModuleGroup.QKV, layer.index, layer.qkv, hidden, step)
        q, k, v = torch.split_with_sizes(
            qkv.view(qkv.shape[0], -1, config.head_dim), self._heads, dim=1
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            q = self._rms_norm(q, layer.query_norm)
            k = self._rms_norm(k, layer.key_norm)
        rotation = None if layer.rope is None else step.rotations[layer.rope]
        if rotation is not None and not step.attention.rotates:
            self._ops.rope_(q, k, *rotation)
            rotation = None
        attended = step.attention(
            layer.index,
            q,
            k,
            v,
            step.batch,
            scale=config.attention_scale,
            window=layer.window,
            softcap=config.attention_softcap,
            rotation=rotation,
        )
        out = self._linear(ModuleGroup.OUT, layer.index, layer.out, attended, step)
        return self._branch_output(out, layer.attention_out_norm)

    def _feed_forward(self, layer: _Layer, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        gate_up = self._linear(ModuleGroup.GATE_UP, layer.index, layer.gate_up, hidden, step)
        activated = self._activate(gate_up)
        out = self._linear(ModuleGroup.DOWN, layer.index, layer.down, activated, step)
        return self._branch_output(out, layer.mlp_out_norm)

    def _linear(
        self,
        group: ModuleGroup,
        layer: int,
        packed: PackedLinear,
        x: torch.Tensor,
        step: _Step,
    ) -> torch.Tensor:
        y = self._ops.linear(x, packed)
        if step.lora is not None:
            step.hook.apply(group, layer, x, y, step.lora, packed.bias)
        return y

    def _branch_output(self, out: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """What a branch adds to the residual."""
        if norm is not None:
            out = self._rms_norm(out, norm)
        multiplier = self.config.residual_multiplier
        return out if multiplier == 1.0 else out.mul_(multiplier)
