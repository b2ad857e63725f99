"""A draft head as autograd sees it: the same equations as `packed`, in fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyloom.adapters.draft_heads.checkpoint import NORMS
from polyloom.adapters.draft_heads.config import DraftHeadConfig
from polyloom.adapters.draft_heads.layout import LINEARS, head_layout


class _Linear(nn.Module):
    """A weight, and a low-rank delta on it where one is trained: the weight is frozen then."""

    def __init__(self, weight: Tensor, rank: int | None, *, frozen: bool) -> None:
        super().__init__()
        frozen = frozen or rank is not None
        self.weight = nn.Parameter(weight.float(), requires_grad=not frozen)
        self.lora_A = self.lora_B = None
        if rank is not None:
            self.lora_A = nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)
            self.lora_B = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if self.lora_A is None or self.lora_B is None:
            return y
        return y + F.linear(F.linear(x, self.lora_A), self.lora_B)


class HeadNetwork(nn.Module):
    """A shared head, or a delta on a frozen one."""

    def __init__(
        self,
        config: DraftHeadConfig,
        weights: dict[str, Tensor],
        output_rows: Tensor,
        rank: int | None,
    ) -> None:
        """config: of the shared head, or of the delta.  weights: of the shared head, under their
        stored names.  output_rows: `[draft_vocab, hidden]` of the base.  rank: of the delta to
        train; None trains the head itself."""
        super().__init__()
        self._eps = config.rms_norm_eps
        self.output_rows = output_rows
        shared_vocab = len(weights["d2t"]) if rank is not None else len(output_rows)
        trained = {name: f"{name}.weight" for name in LINEARS if name != "lm_head"}
        self.linears = nn.ModuleDict(
            {name: _Linear(weights[key], rank, frozen=False) for name, key in trained.items()}
        )
        self.linears["lm_head"] = _output(output_rows, shared_vocab, rank)
        self.norms = nn.ParameterDict(
            {
                name: nn.Parameter(weights[f"{name}.weight"].float(), requires_grad=rank is None)
                for name in NORMS
            }
        )

    def forward(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Next features `[N, hidden]` and logits `[N, draft_vocab]`, as `PackedHead.step`."""
        fused = torch.cat(
            (self._normed("hidden_norm", features), self._normed("embed_norm", embeddings)), dim=-1
        )
        x = self.linears["fc"](fused)
        gate, up = self.linears["gate_up_proj"](self._normed("mlp_norm", x)).chunk(2, dim=-1)
        x = x + self.linears["down_proj"](F.silu(gate) * up)
        return x, self.linears["lm_head"](self._normed("norm", x))

    def stored(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What was trained, under the names of a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, linear in self.linears.items():
            for part, parameter in linear.named_parameters():
                if parameter.requires_grad:
                    key = f"{name}.weight" if part == "weight" else f"{name}.{part}.weight"
                    tensors[key] = parameter.detach().to(dtype)
        for name, parameter in self.norms.items():
            if parameter.requires_grad:
                tensors[f"{name}.weight"] = parameter.detach().to(dtype)
        return tensors

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.norms[name], self._eps)


def _output(rows: Tensor, shared_vocab: int, rank: int | None) -> _Linear:
    """The base's rows for the shared vocabulary. An adapter's own tokens have none there: the delta
    alone makes their logits, and begins as the best approximation of their rows of its rank."""
    linear = _Linear(rows.clone(), rank, frozen=True)
    linear.weight.data[shared_vocab:] = 0
    own = rows[shared_vocab:]
    if linear.lora_A is not None and linear.lora_B is not None and len(own):
        left, sizes, right = torch.linalg.svd(own, full_matrices=False)
        kept = min(len(linear.lora_A), len(sizes))
        linear.lora_A.data[:kept] = right[:kept]
        linear.lora_B.data[shared_vocab:, :kept] = left[:, :kept] * sizes[:kept]
    return linear


def fresh_weights(config: DraftHeadConfig, final_norm: Tensor) -> dict[str, Tensor]:
    """Where the training of a shared head begins. final_norm: `[hidden]` of the base, with which
    the features come out of the last norm as large as the base's output head expects them."""
    weights = {
        f"{shape.slices[0].name}.weight": torch.randn(shape.out_features, shape.in_features)
        * shape.in_features**-0.5
        for shape in head_layout(config).groups
        if shape.slices[0].name != "lm_head"
    }
    ones = torch.ones(config.hidden_size)
    norms = {f"{name}.weight": ones.clone() for name in NORMS}
    return weights | norms | {"norm.weight": final_norm.float().clone()}
