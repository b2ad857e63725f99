"""How the model that a trainer wrapped named its modules, against how this base names them.

The same decoder is `model.layers.…` in a causal LM, `layers.…` in the bare model, and lies under
`language_model` in a multimodal one. All tensors of a file must agree on one of these.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from polyloom.adapters.base_layout import BaseLayout, ModuleGroup
from polyloom.adapters.errors import InvalidAdapterError

_LAYERS = re.compile(r"(?P<prefix>(?:[\w-]+\.)*?layers)\.(?P<rest>\d+\..+)", re.ASCII)
_KNOWN_LAYERS = (
    "model.layers",
    "layers",
    "language_model.layers",
    "language_model.model.layers",
    "model.language_model.layers",
    "model.language_model.model.layers",
)
_EMBEDDING = "embed_tokens"
_KNOWN_HEADS = ("lm_head", "language_model.lm_head", "model.language_model.lm_head")


@dataclass(frozen=True)
class Naming:
    """The trainer's names of the layers, the head and the embedding, beside the base's."""

    layers: str
    trained_layers: str
    head: str
    trained_head: str

    @property
    def embedding(self) -> str:
        """The base's input embedding."""
        return self.layers.removesuffix("layers") + _EMBEDDING

    @property
    def trained_embedding(self) -> str:
        """The input embedding, as the trainer's model named it."""
        return self.trained_layers.removesuffix("layers") + _EMBEDDING

    @property
    def is_canonical(self) -> bool:
        """The trainer's model named its modules as the base does."""
        return self.layers == self.trained_layers and self.head == self.trained_head

    def trained(self, name: str) -> str:
        """A module of the base, under the trainer's name."""
        if name == self.head:
            return self.trained_head
        return self.trained_layers + name.removeprefix(self.layers)

    def canonical(self, trained: str) -> str:
        """A module under the base's name; unchanged where it is neither a layer's nor the head."""
        if trained == self.trained_head:
            return self.head
        if trained == self.trained_embedding:
            return self.embedding
        if trained.startswith(self.trained_layers + "."):
            return self.layers + trained.removeprefix(self.trained_layers)
        return trained


def infer_naming(layout: BaseLayout, module_names: Iterable[str]) -> Naming:
    """Find the one naming that the modules of a checkpoint follow.

    Raises InvalidAdapterError naming a module when they follow two.
    """
    head = next(m.path for m in layout.modules if m.group is ModuleGroup.HEAD)
    layers = layout.layer_prefix
    trained_layers: str | None = None
    trained_head: str | None = None
    for name in module_names:
        match = _LAYERS.fullmatch(name)
        if match is not None and match["prefix"] in (layers, *_KNOWN_LAYERS):
            if trained_layers not in (None, match["prefix"]):
                message = f"lies under {match['prefix']}, others under {trained_layers}"
                raise InvalidAdapterError(name, message)
            trained_layers = match["prefix"]
        elif name in (head, *_KNOWN_HEADS):
            if trained_head not in (None, name):
                raise InvalidAdapterError(name, f"is a second output head beside {trained_head}")
            trained_head = name
    return Naming(
        layers=layers,
        trained_layers=trained_layers or layers,
        head=head,
        trained_head=trained_head or head,
    )
