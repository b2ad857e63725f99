"""Answers held to a JSON schema: what drafting the forced tokens gives, alone and at 32.

python -m benchmarks.json_drafts [--rounds 5]
"""

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.bars import Bar
from benchmarks.draft_heads import shared_head
from benchmarks.drafting import Base, Drafting, Workload, paired, switched
from benchmarks.speculation import (
    CONCURRENT,
    LENGTHS,
    against_best_fixed,
    controller_bar,
    first_token_bar,
    main,
)
from polyloom.adapters.source import DraftHeadSource
from polyloom.platform.engine.model.store import eos_token_ids
from polyloom.platform.engine.settings import DrafterName
from polyloom.platform.generation.answer_formats import vocabulary_of
from polyloom.routing.grammar import Grammar

LOADS = 4
DRAFTERS: tuple[DrafterName, ...] = ("grammar", "ngram", "draft_head")
AT_ZERO = 0.98  # of the steps: the rest are probes
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_reference_number": {"type": "integer", "minimum": 1, "maximum": 99999},
        "estimated_delivery_time_in_days": {"type": "integer", "minimum": 0, "maximum": 60},
        "preferred_method_of_contact": {"enum": ["email", "telephone", "letter"]},
        "is_a_returning_customer": {"type": "boolean"},
        "shipping_address_country_code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "total_amount_including_taxes": {"type": "integer", "minimum": 0, "maximum": 5000},
        "overall_customer_satisfaction": {"enum": ["low", "medium", "high"]},
        "internal_priority_classification": {"enum": ["routine", "urgent", "critical"]},
    },
    "required": [
        "customer_reference_number",
        "estimated_delivery_time_in_days",
        "preferred_method_of_contact",
        "is_a_returning_customer",
        "shipping_address_country_code",
        "total_amount_including_taxes",
        "overall_customer_satisfaction",
        "internal_priority_classification",
    ],
    "additionalProperties": False,
}
QUESTIONS = (
    "A customer from Norway asks when the green lamp arrives. Describe the order as JSON.",
    "Describe the order of a new customer in Spain who prefers letters as JSON.",
    "Write the record of an angry customer whose parcel is late as a JSON object.",
    "A returning customer from Canada praises the service. Make a JSON record of it.",
)


def json_answers(base: Base, head: DraftHeadSource | None = None) -> Workload:
    """Objects whose keys are much longer than their values."""
    ends = eos_token_ids(base.folder)
    schema = Grammar(
        kind="json_schema", text=json.dumps(SCHEMA), vocabulary=vocabulary_of(base.tokenizer, ends)
    )
    return Workload(
        "JSON with long keys",
        base.questions(QUESTIONS),
        output_tokens=200,
        draft_head=head,
        grammar=schema,
        stop_token_ids=ends,
    )


def one_request_bars(base: Base, rounds: int) -> Iterator[Bar]:
    """Grammar alone."""
    workload = json_answers(base)
    with base.drafting("grammar") as drafting:
        ratio = paired(drafting.engine, workload, "off", "adaptive", rounds)
        yield ratio.at_least(f"grammar on {workload.name}, times masking alone", 1.5)
        yield against_best_fixed(drafting, workload, LENGTHS, rounds)
        yield first_token_bar(drafting, "grammar", workload, base)


def at_once_bars(base: Base) -> Iterator[Bar]:
    """All drafters are there; only forced tokens are worth their rows."""
    workload = json_answers(base, shared_head())
    prompts = list(itertools.islice(itertools.cycle(workload.prompts), CONCURRENT))
    with base.drafting(*DRAFTERS) as drafting:
        loads = [[workload.request(p, "adaptive") for p in prompts] for _ in range(3 + LOADS)]
        switched(drafting, loads[:2])  # it is learned what pays
        before = _steps_by_drafter(drafting)
        yield switched(drafting, loads[2:]).at_least(
            f"forced tokens in {CONCURRENT} JSON answers, times masking alone", 1.0
        )
        after = _steps_by_drafter(drafting)
        forced, *others = (after[name].since(before[name]) for name in DRAFTERS)
        yield Bar("forced tokens there", f"on in {forced:.0%} of the steps", "on", forced > 0.1)
        for name, share in zip(DRAFTERS[1:], others, strict=True):
            figure = f"at 0 in {1 - share:.1%} of the steps"
            yield Bar(f"{name} there", figure, ">= 98 %, the rest are probes", 1 - share >= AT_ZERO)
        yield controller_bar(f"{CONCURRENT} JSON answers", drafting)


@dataclass(frozen=True)
class Steps:
    """Of one drafter: sequences' steps with a draft of it, and without."""

    drafted: int = 0
    at_zero: int = 0

    def since(self, before: "Steps") -> float:
        """The share with a draft."""
        drafted = self.drafted - before.drafted
        return drafted / (drafted + self.at_zero - before.at_zero)


def _steps_by_drafter(drafting: Drafting) -> dict[str, Steps]:
    lines = drafting.engine.speculation_report().lines
    return {line.drafter: Steps(line.steps, line.steps_at_zero) for line in lines}


def bars(base: Base, rounds: int) -> Iterator[Bar]:
    yield from one_request_bars(base, rounds)
    yield from at_once_bars(base)


if __name__ == "__main__":
    sys.exit(main(__doc__, bars))
