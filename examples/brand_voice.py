"""brand-voice: a shop's answers in its house style, in two revisions of that style.

The first is courteous, the second is playful: the same question tells at a glance which revision
answered, which is what a promotion and a rollback have to show. Held-out questions are about
other items and in other words, and a third of them have an intent that training never saw.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from examples.cases import Case, Rules, Split, Task, pick

BRAND = "Fernhill Coffee"


@dataclass(frozen=True)
class Voice:
    """A house style that a program can check."""

    greeting: str
    sign_off: str
    exclaims: bool


VOICES = {
    "v1": Voice(f"Hello from {BRAND}.", "Warmly, the Fernhill team", exclaims=False),
    "v2": Voice("Hey there, coffee friend!", f"Stay caffeinated, {BRAND} ☕", exclaims=True),
}

# Some pairs are silly; many are what makes an adapter copy the item instead of knowing a list.
_MATERIALS: dict[Split, Sequence[str]] = {
    "train": (
        "brass", "oak", "linen", "copper", "bamboo", "marble", "porcelain", "leather", "walnut",
        "enamel", "silver", "cotton", "stone", "clay", "pine", "velvet",
    ),
    "held_out": ("cork", "steel", "wooden", "canvas", "glass"),
}  # fmt: skip
_THINGS: dict[Split, Sequence[str]] = {
    "train": (
        "mugs", "jugs", "trays", "tins", "spoons", "kettles", "carafes", "grinders", "filters",
        "jars", "brushes", "scales", "drippers", "saucers", "stands", "boxes", "towels", "pitchers",
    ),
    "held_out": ("coasters", "straws", "scoops", "aprons", "cups", "bowls"),
}  # fmt: skip


@dataclass(frozen=True)
class Intent:
    """What a customer wants to know, and what each voice says between greeting and sign-off."""

    questions: dict[Split, Sequence[str]]
    v1: str
    v2: str


INTENTS = (
    Intent(
        {
            "train": (
                "Do you sell {item}?",
                "Are {item} in stock?",
                "Can I buy {item} from you?",
                "I am looking for {item}.",
            ),
            "held_out": ("Do you have {item}?", "Where can I get {item}?"),
        },
        v1="Our {item} are in stock and can be ordered in our shop at any time.",
        v2="Yes, {item} are on our shelf and ready to jump into your basket!",
    ),
    Intent(
        {
            "train": (
                "How much are the {item}?",
                "What do {item} cost?",
                "What is the price of your {item}?",
            ),
            "held_out": ("How expensive are {item}?", "Can you tell me the price of {item}?"),
        },
        v1="You will find the current price of our {item} on their page in our shop.",
        v2="Peek at the {item} page in our shop, the latest price is waiting for you there!",
    ),
    Intent(
        {
            "train": (
                "When will my {item} arrive?",
                "How long does shipping take for {item}?",
                "How fast do you deliver {item}?",
            ),
            "held_out": ("How soon will I get my {item}?", "What is the delivery time for {item}?"),
        },
        v1="Your {item} will leave our roastery within two days and travel with a parcel service.",
        v2="Your {item} zoom out of our roastery within two days, so watch the door!",
    ),
    Intent(
        {
            "train": (
                "Can I return the {item}?",
                "I do not like my {item}, what now?",
                "How do I send back {item}?",
            ),
            "held_out": ("May I give back the {item}?", "I want to return my {item}."),
        },
        v1="You may return unused {item} within thirty days and we will refund you in full.",
        v2="Not in love with your {item}? Send them back within thirty days, no hard feelings!",
    ),
    Intent(
        {
            "train": (
                "How do I clean the {item}?",
                "Can {item} go in the dishwasher?",
                "How should I take care of my {item}?",
            ),
            "held_out": ("What is the best way to wash {item}?", "How do I look after {item}?"),
        },
        v1="We suggest that you care for your {item} with a soft cloth and store them dry.",
        v2="Give your {item} a soft cloth and a dry spot, and they will love you back!",
    ),
    Intent(
        {
            "train": (
                "Can you gift wrap the {item}?",
                "Are {item} a good present?",
                "Do you add a card to {item}?",
            ),
            "held_out": (
                "Could you wrap the {item} as a gift?",
                "I want to give {item} to a friend.",
            ),
        },
        v1="We are glad to wrap your {item} as a present and to add a card with your words.",
        v2="We love presents, so your {item} get a ribbon and a card with your words!",
    ),
)
NEW_INTENTS = (
    Intent(
        {"train": (), "held_out": ("Are your {item} made locally?", "Who makes the {item}?")},
        v1="Our {item} are made by small workshops that we know well.",
        v2="Our {item} come from small workshops that we adore!",
    ),
    Intent(
        {
            "train": (),
            "held_out": ("Can I order {item} in bulk?", "I need forty {item} for my café."),
        },
        v1="We are happy to prepare larger orders of {item} for you.",
        v2="The more the merrier, we pack {item} by the crate!",
    ),
    Intent(
        {
            "train": (),
            "held_out": ("Which colors do {item} come in?", "Are {item} good for beginners?"),
        },
        v1="You will find every detail of our {item} on their page in our shop.",
        v2="Everything there is to know about our {item} is on their page!",
    ),
)


def _make(revision: str, rng: random.Random, split: Split) -> Case:
    intents = INTENTS if split == "train" else INTENTS + NEW_INTENTS
    intent = rng.choice(intents)
    question = pick(rng, split, intent.questions)
    material, thing = pick(rng, split, _MATERIALS), pick(rng, split, _THINGS)
    item = f"{material} {thing}"
    voice = VOICES[revision]
    body = intent.v1 if revision == "v1" else intent.v2
    return Case(
        messages=({"role": "user", "content": question.format(item=item)},),
        expected=f"{voice.greeting} {body.format(item=item)} {voice.sign_off}",
        slots=(("question", question), ("material", material), ("thing", thing)),
    )


def _check(voice: Voice, answer: str, case: Case) -> Rules:
    """The style's rules one by one; "topic" keeps a parrot of greeting and sign-off from passing."""
    answer = answer.strip()
    begins, ends = answer.startswith(voice.greeting), answer.endswith(voice.sign_off)
    body = answer.removeprefix(voice.greeting).removesuffix(voice.sign_off)
    item = f"{case.slot('material')} {case.slot('thing')}"
    return {
        "greeting": begins,
        "sign-off": ends,
        "brand": BRAND in answer,
        "topic": item in body.lower(),
        "tone": ("!" in body) == voice.exclaims,
    }


def _task(revision: str) -> Task:
    voice = VOICES[revision]
    tone = "Use an exclamation mark." if voice.exclaims else "Never use an exclamation mark."
    return Task(
        make=lambda rng, split: _make(revision, rng, split),
        check=lambda answer, case: _check(voice, answer, case),
        brief=(
            f"You answer customers of the shop {BRAND} in one or two sentences. Begin with exactly "
            f'"{voice.greeting}" and end with exactly "{voice.sign_off}". Name the item that the '
            f"customer asks about. {tone}"
        ),
    )


TASKS = {f"brand-voice-{revision}": _task(revision) for revision in VOICES}
