"""Why a prompt was not found: what sets it apart from the most similar one of its owner."""

from dataclasses import replace

import pytest

from polyloom.kvcache.namespace import Namespace
from polyloom.kvcache.prefix_counters import GroupCounters, Miss
from polyloom.kvcache.prefix_index import Epoch
from polyloom.kvcache.prompt_memory import PROMPTS_PER_OWNER, PromptMemory

SIZE = 16
MINE = Namespace(
    owner_kind="tenant",
    owner_name="mine",
    base_digest="base",
    adapter_digest="one",
    tokenizer_digest="tokenizer",
    template_digest="template",
    tool_schema_digest=None,
    salt=None,
    kv_dtype="float32",
)
SYSTEM = tuple(range(100, 164))


def epoch(**fields: str) -> Epoch:
    namespace = replace(MINE, **fields)
    return Epoch(namespace, namespace.root(), GroupCounters())


def remembering(*prompts: tuple[Epoch, tuple[int, ...]]) -> PromptMemory:
    memory = PromptMemory(SIZE)
    for number, (where, tokens) in enumerate(prompts):
        memory.remember(where, str(number).encode(), tokens)
    return memory


def explain(memory: PromptMemory, where: Epoch, tokens: tuple[int, ...], blocks: int = 0) -> Miss:
    return memory.explain(where, tokens, blocks, (len(tokens) - 1) // SIZE)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("adapter_digest", "revision"),
        ("template_digest", "template"),
        ("tokenizer_digest", "tokenizer"),
        ("tool_schema_digest", "tools"),
        ("salt", "salt"),
    ],
)
def test_a_namespace_field_is_named(field: str, reason: str) -> None:
    memory = remembering((epoch(), SYSTEM))
    assert explain(memory, epoch(**{field: "other"}), SYSTEM) == Miss(reason)


def test_a_timestamp_is_shown_with_what_surrounds_it() -> None:
    earlier = (*SYSTEM[:20], 1, 2, *SYSTEM[22:])
    later = (*SYSTEM[:20], 1, 3, *SYSTEM[22:])
    memory = remembering((epoch(), (5, 6, 7)), (epoch(), earlier), (epoch(), (9,) * 64))
    miss = explain(memory, epoch(), later, blocks=1)
    assert miss == Miss("tokens", 21, later[5:21], earlier[21:37], later[21:37])


def test_the_most_similar_prompt_counts_also_behind_a_difference_at_its_start() -> None:
    earlier = (1, 2, *SYSTEM)
    memory = remembering((epoch(), earlier), (epoch(), (1, 9, *range(500, 560))))
    miss = explain(memory, epoch(), (1, 3, 4, *SYSTEM))
    assert (miss.position, miss.before, miss.expected) == (1, (1,), earlier[1:17])


def test_the_same_namespace_explains_better_than_another_as_similar() -> None:
    where = epoch(salt="new")
    memory = remembering((epoch(), SYSTEM), (where, SYSTEM), (epoch(salt="x"), SYSTEM))
    assert explain(memory, where, SYSTEM) == Miss("evicted")
    where.alive = False
    assert explain(memory, where, SYSTEM) == Miss("invalidated")


def test_a_prompt_that_goes_on_where_another_ended() -> None:
    memory = remembering((epoch(), SYSTEM[:40]))
    miss = explain(memory, epoch(), SYSTEM, blocks=2)
    assert (miss.reason, miss.position, miss.expected) == ("tokens", 40, ())
    assert miss.found == SYSTEM[40:56]


def test_another_owners_prompts_explain_nothing() -> None:
    memory = remembering((epoch(), SYSTEM))
    assert explain(memory, epoch(owner_name="yours"), SYSTEM) == Miss("first")
    assert explain(memory, epoch(owner_kind="group"), SYSTEM) == Miss("first")
    assert explain(memory, epoch(), (7,) * 40) == Miss("first")


def test_prompts_owners_and_tokens_are_bounded() -> None:
    memory = PromptMemory(SIZE, max_tokens=PROMPTS_PER_OWNER * 100)
    for number in range(2 * PROMPTS_PER_OWNER):
        memory.remember(epoch(), str(number).encode(), (number, *range(49)))
    assert explain(memory, epoch(), (0, *range(60))).reason == "tokens"
    assert memory._num_tokens == PROMPTS_PER_OWNER * 50
    for number in range(200):
        memory.remember(epoch(owner_name=str(number)), b"", SYSTEM)
        assert memory._num_tokens <= PROMPTS_PER_OWNER * 100
    assert explain(memory, epoch(), (1, *range(60))) == Miss("first")
    assert len(memory._owners) <= 100
    memory.forget(lambda namespace: True)
    assert (memory._num_tokens, len(memory._owners)) == (0, 0)
