"""Whether the base that a config names is this base.

Trainers write a hub id, or the path of wherever the model lay (`/root/models/SmolLM2-135M`,
`…/models--org--name/snapshots/<hash>`). Only a last path component, or the name inside a hub
cache's folder, is a name; case, and the suffixes of the quantised copies that QLoRA trains on, are
no part of it.
"""

import re

_HUB_CACHE = re.compile(r"(?:^|/)models--(?:[^/]+--)?([^/]+?)(?:/|$)")
_QUANTISED = re.compile(r"(?:-unsloth)?-bnb-[48]bit$|-(?:gptq|awq)(?:-int[48])?$")


def same_base(named: str, base_name: str) -> bool:
    """Compare the config's `base_model_name_or_path` with the base's name, hub id or folder."""
    return _plain_name(named) == _plain_name(base_name)


def _plain_name(name: str) -> str:
    path = name.replace("\\", "/").rstrip("/").casefold()
    cached = _HUB_CACHE.search(path)
    last = cached[1] if cached else path.rsplit("/", 1)[-1]
    return _QUANTISED.sub("", last.removesuffix(".gguf"))
