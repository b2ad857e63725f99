"""From what a tenant wants held to the prompt whose blocks are held."""

import hashlib
from collections import OrderedDict

import msgspec

from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.inference import Inference, Prompt, Target
from polyloom.platform.generation.request_plan import ServedModel
from polyloom.platform.generation.templates import Message
from polyloom.platform.services.views import TenantView
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams

ENDPOINT = "prefixes"
REMEMBERED = 1_024


class HeldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be warm, as it was sent: a conversation's beginning, or a prompt's.

    messages: as templates take them.  prompt: a text or token ids.  Exactly one of them is given.
    """

    model: str
    messages: list[Message] | None = None
    prompt: str | list[int] | None = None
    cache_salt: str | None = None


class HoldPlanner:
    """Resolves and renders what is held, as requests that come later will be.

    The model is resolved anew each time, so that an alias takes the held prefix along when it moves.
    """

    def __init__(self, inference: Inference, block_size: int) -> None:
        """block_size: tokens of the engines' cache blocks; less is not held."""
        self._inference = inference
        self._block_size = block_size
        self._tokens: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    async def plan(self, tenant: TenantView, hold: int, held: HeldRequest) -> GenerationRequest:
        """A request that prefills the prefix and leaves it held, with `hold` (a number of the
        installation) and what it resolves to in its id.

        Raises InvalidRequest, ContextLengthExceeded, RoutingError, EngineUnavailable.
        """
        target = await self._inference.target(
            tenant, None, held.model, ENDPOINT, session=f"hold-{hold}", salt=held.cache_salt
        )
        ids = await self._prefix(target, held)
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        request = self._inference.call(target, [Prompt(ids, sampling)], 1, ()).plan.sequences[0]
        return msgspec.structs.replace(request, hold=_hold_id(hold, request))

    async def _prefix(self, target: Target, held: HeldRequest) -> tuple[int, ...]:
        key = _digest(target.format.digest, target.tenant.slug, msgspec.json.encode(held))
        known = self._tokens.get(key)
        if known is None:
            known = await _encode(target, held)
            param = "prompt" if held.messages is None else "messages"
            _check_length(known, target.served, self._block_size, param)
            self._tokens[key] = known
        self._tokens.move_to_end(key)
        if len(self._tokens) > REMEMBERED:
            self._tokens.popitem(last=False)
        return known


async def _encode(target: Target, held: HeldRequest) -> tuple[int, ...]:
    if held.messages is not None:
        return await _conversation(target, held.messages)
    if isinstance(held.prompt, str):
        return await _encoded(target, held.prompt, special_tokens=True, param="prompt")
    return tuple(held.prompt or ())


async def _conversation(target: Target, messages: list[Message]) -> tuple[int, ...]:
    """The tokens that every continuation of the conversation begins with: what two different next
    messages have in common, so that neither the template's end nor a merged token is held."""
    role = "assistant" if messages[-1]["role"] == "user" else "user"
    texts = [
        await target.format.render(
            [*messages, {"role": role, "content": content}], target.tenant.slug
        )
        for content in ("A", "9")
    ]
    one, other = [
        await _encoded(target, text, special_tokens=False, param="messages") for text in texts
    ]
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return one[:common]


async def _encoded(
    target: Target, text: str, *, special_tokens: bool, param: str
) -> tuple[int, ...]:
    return tuple(
        await target.format.tokenizer.encode(
            text, special_tokens=special_tokens, max_tokens=target.served.prompt, param=param
        )
    )


def _check_length(ids: tuple[int, ...], served: ServedModel, block_size: int, param: str) -> None:
    if len(ids) < block_size:
        message = (
            f"later requests will begin with {len(ids)} tokens of the prefix, fewer than the "
            f"{block_size} of a cache block"
        )
        raise InvalidRequest(message, param=param)
    if len(ids) > min(served.prompt, served.context - 1):
        message = f"a prefix of {len(ids)} tokens is too long for this model"
        raise InvalidRequest(message, param=param)


def _hold_id(number: int, request: GenerationRequest) -> str:
    """Another id for another combination, cache or prefix."""
    cache, combination = msgspec.json.encode(request.cache), request.combination.fingerprint
    digest = _digest(str(number), combination, cache, msgspec.json.encode(request.prompt))
    return f"hold-{number}-{digest.hex()[:24]}"


def _digest(*parts: str | bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()
