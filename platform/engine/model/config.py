"""What a decoder is, in numbers: one frozen value that every family's config is read into."""

from dataclasses import dataclass
from enum import StrEnum


class Activation(StrEnum):
    """Nonlinearity of the gated MLP: `down(act(gate) * up)`."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of a layer: angles `position * inv_freq`, halves rotated (NeoX order).

    inv_freq: fp32 values, one a rotated pair; the first `2 * len(inv_freq)` dims of a head rotate,
        the rest pass through.
    attention_factor: multiplies cos and sin (YaRN, LongRoPE).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True)
class LayerConfig:
    """What differs between layers.

    rope: None for a layer without position embedding.
    window: tokens that a token sees, itself included; None sees the whole context.
    """

    rope: RopeConfig | None
    window: int | None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer of the Llama lineage.

    Per layer, with `n` an RMS norm and `r` the residual multiplier:
    `x += r * post_attention?(out(attention(qkv(n(x)))))`, then
    `x += r * post_feedforward?(down(act(gate(n(x))) * up(n(x))))`; the marked norms exist with
    `sandwich_norms` (Gemma).

    max_model_len: longest context whose KV does not depend on the length of its sequence.
    norm_plus_one: norms multiply by `1 + weight` (Gemma).
    qk_norm: RMS norm over each query and key head before the rotation.
    fused_checkpoint: the checkpoint stores qkv and gate-up fused (Phi-3).
    embedding_scale: embeddings are multiplied by it, rounded to the weights' dtype first.
    attention_scale: multiplies q·k.  attention_softcap, logits_softcap: `c * tanh(x / c)`.
    logits_divisor: divides the logits before the soft cap.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    activation: Activation
    norm_eps: float
    norm_plus_one: bool
    sandwich_norms: bool
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    fused_checkpoint: bool
    tied_head: bool
    embedding_scale: float
    attention_scale: float
    attention_softcap: float | None
    residual_multiplier: float
    logits_divisor: float
    logits_softcap: float | None
    layers: tuple[LayerConfig, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def query_size(self) -> int:
        """Output features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Output features of all key heads (and of all value heads)."""
        return self.num_kv_heads * self.head_dim
