"""support-tickets: a customer's message becomes a compact JSON ticket.

The product has to be copied, the category and the priority have to be understood: held-out
messages name other products and put the problem and its urgency in other words.
"""

import json
import random
from collections.abc import Sequence

from examples.cases import Case, Rules, Split, Task, pick, unfenced

FIELDS = ("category", "priority", "product")

SYSTEM = (
    "Turn the customer's message into a support ticket. Answer with one JSON object and nothing "
    'else. Keys: "category" (billing, delivery, account or defect), "priority" (low, normal or '
    'high), "product" (as the customer wrote it).'
)

# Many, so that the adapter learns to copy a product's name rather than to choose from a list.
_FIRST_WORDS: dict[Split, Sequence[str]] = {
    "train": (
        "Aurora", "Breeze", "Cobalt", "Delta", "Ember", "Falcon", "Granite", "Harbor", "Indigo",
        "Juniper", "Kestrel", "Lumen", "Velvet", "Willow", "Zephyr", "Amber", "Birch", "Comet",
        "Dune", "Echo", "Fjord", "Glacier", "Hazel", "Iris", "Jasper", "Koala", "Lotus", "Maple",
        "Nectar", "Onyx", "Pebble", "Quill", "Ridge", "Sierra", "Tundra", "Umbra", "Vortex",
        "Walnut", "Yonder", "Zenith", "Badger", "Cinder", "Dolphin", "Eclipse", "Fennel", "Ginger",
        "Heron", "Ivory", "Jackal", "Krypton", "Lantern", "Magnet", "Nova", "Otter", "Panther",
        "Raptor", "Sable", "Tango", "Urban", "Wren",
    ),
    "held_out": ("Bison", "Canyon", "Meadow", "Raven", "Summit", "Topaz", "Violet", "Thunder"),
}  # fmt: skip
_SECOND_WORDS: dict[Split, Sequence[str]] = {
    "train": (
        "Kettle", "Lamp", "Router", "Speaker", "Camera", "Keyboard", "Monitor", "Heater", "Scale",
        "Blender", "Watch", "Charger",
    ),
    "held_out": ("Toaster", "Printer", "Headset", "Tablet", "Vacuum", "Drone"),
}  # fmt: skip
_GREETINGS: dict[Split, Sequence[str]] = {
    "train": ("Hi, ", "Hello, ", "Hello team, ", "Dear support, ", ""),
    "held_out": ("Good morning, ", "Hey, "),
}
_PROBLEMS: dict[str, dict[Split, Sequence[str]]] = {
    "billing": {
        "train": (
            "I was charged twice for the {product}.",
            "the invoice for my {product} shows the wrong amount.",
            "my refund for the {product} has not arrived.",
            "you billed me for a {product} that I had cancelled.",
            "the discount code was not applied to my {product}.",
            "I need a receipt for the {product} I bought.",
            "my card was debited two times for one {product}.",
            "my statement shows a fee on top of the {product} price.",
            "the tax on the bill for the {product} looks wrong.",
            "I returned the {product} and still wait for my money back.",
            "I paid more for the {product} than the price on your website.",
            "please correct the company name on the invoice for the {product}.",
        ),
        "held_out": (
            "my bank shows two payments for the {product}.",
            "I am still waiting to be refunded for the {product}.",
            "the bill for my {product} is too high.",
            "I was overcharged for the {product}.",
        ),
    },
    "delivery": {
        "train": (
            "my {product} was supposed to arrive last week.",
            "the parcel with the {product} is lost.",
            "tracking for my {product} has not moved for days.",
            "the courier left the {product} at the wrong address.",
            "I want to change the shipping address for the {product}.",
            "when will the {product} be shipped?",
            "the driver never came with the {product}.",
            "only half of the package came and the {product} was missing.",
            "the {product} is stuck at customs.",
            "the carrier says that the {product} was delivered, but I have nothing.",
            "can you send the {product} to a pickup point instead?",
            "I am still waiting for the {product} I ordered.",
        ),
        "held_out": (
            "my {product} has not been delivered.",
            "the package with my {product} never arrived.",
            "the courier lost my {product}.",
            "please ship the {product} to a different address.",
        ),
    },
    "account": {
        "train": (
            "I cannot log in to register my {product}.",
            "the password reset for my {product} account sends no mail.",
            "please delete the account that I made for the {product}.",
            "I want to change the email address linked to my {product}.",
            "the {product} app says that my user name does not exist.",
            "my login for the {product} is locked after three attempts.",
            "the verification code for my {product} profile never comes.",
            "I lost my password and cannot open the {product} portal.",
            "how do I add a second user to the {product} account?",
            "someone else signed in to my {product} account.",
            "two-factor sign-in for the {product} stopped accepting my phone.",
            "I want to close my profile for the {product}.",
        ),
        "held_out": (
            "I forgot the password for my {product} account.",
            "I cannot sign in to my {product} profile.",
            "my {product} account is locked.",
            "please change the email on my {product} login.",
        ),
    },
    "defect": {
        "train": (
            "my {product} does not turn on any more.",
            "the {product} makes a loud noise and stops.",
            "the screen of the {product} is cracked.",
            "the {product} overheats after five minutes.",
            "the battery of my {product} is dead after an hour.",
            "a button on the {product} is broken.",
            "the {product} leaks.",
            "my {product} switches itself off all the time.",
            "the {product} smells of burnt plastic.",
            "the cable of the {product} came apart.",
            "the {product} shows an error and freezes.",
            "the {product} is faulty right out of the box.",
        ),
        "held_out": (
            "my {product} is broken.",
            "the {product} stopped working.",
            "the {product} gets far too hot and shuts down.",
            "my {product} will not switch on.",
        ),
    },
}
_URGENCY: dict[str, dict[Split, Sequence[str]]] = {
    "high": {
        "train": (
            "This is urgent.",
            "I need this solved today.",
            "We cannot work until it is fixed.",
            "Please answer immediately.",
            "It has to be sorted out within the hour.",
            "This is critical for us.",
            "Act at once, please.",
        ),
        "held_out": ("This is an emergency.", "Please fix it right now.", "I need help today."),
    },
    "normal": {
        "train": (
            "Please get back to me this week.",
            "Could you look into it?",
            "Thanks for your help.",
            "Please let me know what to do.",
            "I would be glad of an answer in the next few days.",
            "What are the next steps?",
            "Please tell me how to go on.",
        ),
        "held_out": (
            "Please look into this for me.",
            "Could you help me with that?",
            "Please reply in the coming days.",
        ),
    },
    "low": {
        "train": (
            "No rush at all.",
            "Whenever you have time.",
            "It is not urgent.",
            "Next month is fine too.",
            "Take your time.",
            "This is only a minor thing.",
            "I can live with it for now.",
        ),
        "held_out": ("There is no hurry.", "It can wait.", "Take as long as you need."),
    },
}


def make(rng: random.Random, split: Split) -> Case:
    category = rng.choice(list(_PROBLEMS))
    priority = rng.choice(list(_URGENCY))
    first, second = pick(rng, split, _FIRST_WORDS), pick(rng, split, _SECOND_WORDS)
    product = f"{first} {second}"
    problem = pick(rng, split, _PROBLEMS[category])
    urgency = pick(rng, split, _URGENCY[priority])
    greeting = pick(rng, split, _GREETINGS)
    sentence = problem.format(product=product)
    if not greeting:
        sentence = sentence[0].upper() + sentence[1:]
    ticket = {"category": category, "priority": priority, "product": product}
    return Case(
        messages=(
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{greeting}{sentence} {urgency}"},
        ),
        expected=json.dumps(ticket, separators=(",", ":")),
        slots=(
            ("first", first),
            ("second", second),
            ("problem", problem),
            ("urgency", urgency),
            ("greeting", greeting),
        ),
    )


def check(answer: str, case: Case) -> Rules:
    """JSON with exactly the three keys, and each field on its own: the table shows what is weak."""
    wanted = json.loads(case.expected)
    try:
        ticket = json.loads(unfenced(answer))
    except ValueError:
        ticket = None
    known = ticket if isinstance(ticket, dict) else {}
    return {
        "json": set(known) == set(FIELDS),
        **{field: known.get(field) == wanted[field] for field in FIELDS},
    }


TASK = Task(make=make, check=check)
