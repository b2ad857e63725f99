"""Training a head: soft targets from the base's own states, several drafts deep, resumable."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from polyloom.platform.engine.draft_heads.training.acceptance import replay_head
from polyloom.platform.engine.draft_heads.training.network import HeadNetwork
from polyloom.platform.engine.draft_heads.training.samples import Response, Samples, samples

DEPTH_WEIGHT = 0.8
HARD_WEIGHT = 0.1
FEATURE_NOISE = 0.02
PATIENCE = 2
"""Epochs without a better acceptance on held-out prompts, after which training ends."""


@dataclass(frozen=True)
class FitConfig:
    """depth: drafts in a row that are trained and judged.  seconds: wall clock after which no epoch
    is begun; None for all `epochs`."""

    depth: int = 3
    epochs: int = 8
    batch_size: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class FitResult:
    """epochs: how many were run.  acceptance_length: of the best one, whose weights are kept."""

    epochs: int
    acceptance_length: float
    seconds: float


@dataclass(frozen=True)
class FitProgress:
    """One step more. epochs: the part of an epoch that it was.  best: acceptance length so far."""

    epochs: float
    loss: float
    best: float


OnStep = Callable[[FitProgress], None]


class Fit:
    """One run of training; its state is saved after every epoch and taken up from there."""

    def __init__(
        self,
        network: HeadNetwork,
        target_ids: Tensor,
        embeddings: Tensor,
        config: FitConfig,
        state_file: Path,
    ) -> None:
        """target_ids: `[draft_vocab]`.  embeddings: `[vocab, hidden]`."""
        self._network = network
        self._target_ids = target_ids
        self._embeddings = embeddings
        self._config = config
        self._state_file = state_file
        self._draft_ids = torch.full((len(embeddings),), -1)
        self._draft_ids[target_ids] = torch.arange(len(target_ids))
        self._parameters = [p for p in network.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, config.learning_rate, weight_decay=config.weight_decay
        )
        self._epoch = 0
        self._stale = 0
        self._best = 0.0
        self._spent = 0.0
        self._kept = self._weights()

    def run(
        self, train: Sequence[Response], held_out: Sequence[Response], on_step: OnStep
    ) -> FitResult:
        """Train until the epochs, the time or the patience are over; the network has the best
        weights on return. Goes on from the state file if there is one."""
        config, data = self._config, samples(train, self._config.depth)
        per_epoch = math.ceil(len(data) / config.batch_size)
        self._resume()
        if self._epoch == 0:
            self._judge(held_out)
        while self._epoch < config.epochs and self._stale < PATIENCE:
            if config.seconds is not None and self._spent >= config.seconds:
                break
            started = time.monotonic()
            generator = torch.Generator().manual_seed(config.seed + self._epoch)
            order = torch.randperm(len(data), generator=generator)
            for index, batch in enumerate(torch.split(order, config.batch_size)):
                step = self._epoch * per_epoch + index
                self._set_rate(step, per_epoch * config.epochs)
                loss = self._step(data, batch, generator)
                on_step(FitProgress(1 / per_epoch, loss, self._best))
            self._epoch += 1
            self._judge(held_out)
            self._spent += time.monotonic() - started
            self._save()
        self._network.load_state_dict(self._kept, strict=False)
        return FitResult(self._epoch, self._best, self._spent)

    def _step(self, data: Samples, batch: Tensor, generator: torch.Generator) -> float:
        features = data.hidden[data.features[batch]]
        features = features + FEATURE_NOISE * torch.randn(features.shape, generator=generator)
        total = torch.zeros(())
        for k in range(self._config.depth):
            tokens, states = data.tokens[batch, k : k + 2], data.states[batch, k]
            present = tokens[:, 1] >= 0
            embedded = self._embeddings[tokens[:, 0].clamp(min=0)].float()
            with torch.autocast("cpu", torch.bfloat16):
                features, logits = self._network(features, embedded)
            loss = self._loss(logits[present], tokens[present, 1], data.hidden[states[present]])
            total = total + DEPTH_WEIGHT**k * loss
        self._optimizer.zero_grad()
        torch.autograd.backward(total)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        return total.item()

    def _loss(self, logits: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
        """KL from the base's distribution over the draft vocabulary, and a little cross entropy.

        tokens: `[N]` what the target chose.  states: `[N, hidden]` that it chose them from.
        """
        if len(tokens) == 0:
            return logits.sum()
        logprobs = F.log_softmax(logits.float(), dim=-1)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            soft = F.softmax(F.linear(states, self._network.output_rows).float(), dim=-1)
        kl = -(soft * logprobs).sum() / len(tokens)
        labels = self._draft_ids[tokens]
        drafted = labels >= 0
        hard = F.nll_loss(logprobs[drafted], labels[drafted], reduction="sum") / len(tokens)
        return kl + HARD_WEIGHT * hard

    def _set_rate(self, step: int, steps: int) -> None:
        rate = self._config.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _judge(self, held_out: Sequence[Response]) -> None:
        """Keep the weights if they are the best yet."""
        length = replay_head(
            self._network, held_out, self._embeddings, self._target_ids, self._config.depth
        ).acceptance_length
        if length > self._best:
            self._best, self._stale, self._kept = length, 0, self._weights()
        else:
            self._stale += 1

    def _weights(self) -> dict[str, Tensor]:
        """Copies of what is trained."""
        return {
            name: parameter.detach().clone()
            for name, parameter in self._network.named_parameters()
            if parameter.requires_grad
        }

    def _save(self) -> None:
        state = {
            "epoch": self._epoch,
            "stale": self._stale,
            "best": self._best,
            "spent": self._spent,
            "kept": self._kept,
            "weights": self._weights(),
            "optimizer": self._optimizer.state_dict(),
        }
        partial = self._state_file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._state_file)

    def _resume(self) -> None:
        if not self._state_file.exists():
            return
        state = torch.load(self._state_file, weights_only=True)
        self._epoch, self._stale = state["epoch"], state["stale"]
        self._best, self._spent, self._kept = state["best"], state["spent"], state["kept"]
        self._network.load_state_dict(state["weights"], strict=False)
        self._optimizer.load_state_dict(state["optimizer"])
