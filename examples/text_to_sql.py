"""text-to-sql: a question becomes one SQLite query over a small fixed schema.

An answer is right if it returns the reference's rows on every fixture database. Several
databases, because on a single one a wrong query easily returns the right count by luck.
"""

import random
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from examples.cases import Case, Rules, Split, Task, pick, unfenced

SCHEMA = """\
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, product TEXT, amount INTEGER,
status TEXT);"""

SYSTEM = (
    "Answer with one SQLite query and nothing else. Tables: customers(id, name, city), "
    "orders(id, customer_id, product, amount, status). status is open, shipped or returned."
)

FIXTURES = (1, 2, 3)
_STEP_LIMIT = 1_000_000

SLOTS: dict[str, dict[Split, Sequence[str]]] = {
    "city": {
        "train": (
            "Lisbon", "Oslo", "Vienna", "Dublin", "Prague", "Athens", "Geneva", "Turin",
            "Hamburg", "Lyon", "Warsaw", "Zurich",
        ),
        "held_out": ("Berlin", "Madrid", "Helsinki", "Bruges"),
    },
    "name": {
        "train": (
            "Alice", "Bruno", "Carla", "Dario", "Elena", "Felix", "Greta", "Hugo", "Ines",
            "Jonas", "Katya", "Leon",
        ),
        "held_out": ("Marta", "Nora", "Oscar", "Paula"),
    },
    "product": {
        "train": (
            "lamp", "chair", "desk", "mirror", "carpet", "shelf", "sofa", "clock", "vase",
            "bench", "stool", "curtain",
        ),
        "held_out": ("table", "pillow", "candle", "basket"),
    },
    "number": {
        "train": tuple(str(n) for n in range(20, 180) if n % 7 != 0),
        "held_out": tuple(str(n) for n in range(21, 180, 7)),
    },
}  # fmt: skip
STATUSES = ("open", "shipped", "returned")
_JOIN = "FROM orders JOIN customers ON customers.id = orders.customer_id"


@dataclass(frozen=True)
class Family:
    """One kind of question: its query, and how people ask for it."""

    sql: str
    phrasings: dict[Split, Sequence[str]]


FAMILIES = (
    Family(
        "SELECT COUNT(*) FROM customers WHERE city = '{city}';",
        {
            "train": (
                "How many customers live in {city}?",
                "Count the customers in {city}.",
                "What is the number of customers in {city}?",
                "How many people from {city} are customers?",
            ),
            "held_out": ("How many customers are in {city}?", "Number of customers from {city}?"),
        },
    ),
    Family(
        "SELECT name FROM customers WHERE city = '{city}';",
        {
            "train": (
                "List the names of customers in {city}.",
                "Who lives in {city}?",
                "Show me all customer names from {city}.",
                "Which customers are from {city}?",
            ),
            "held_out": (
                "Which customers live in {city}?",
                "Give me the customer names in {city}.",
            ),
        },
    ),
    Family(
        "SELECT city FROM customers WHERE name = '{name}';",
        {
            "train": (
                "Where does {name} live?",
                "What is the city of {name}?",
                "Which city is {name} from?",
                "Show the city of customer {name}.",
            ),
            "held_out": ("In which city does {name} live?", "What city is {name} in?"),
        },
    ),
    Family(
        "SELECT COUNT(*) FROM orders WHERE product = '{product}';",
        {
            "train": (
                "How many orders are there for {product}?",
                "Count the orders of {product}.",
                "How often was {product} ordered?",
                "What is the number of {product} orders?",
            ),
            "held_out": ("How many {product} orders do we have?", "Count all {product} orders."),
        },
    ),
    Family(
        "SELECT SUM(amount) FROM orders WHERE product = '{product}';",
        {
            "train": (
                "What is the total amount of {product} orders?",
                "How much money did {product} bring in?",
                "Sum the amount of all orders of {product}.",
                "What is the revenue from {product}?",
            ),
            "held_out": (
                "What is the total revenue of {product}?",
                "Add up the amount of {product} orders.",
            ),
        },
    ),
    Family(
        "SELECT MAX(amount) FROM orders WHERE product = '{product}';",
        {
            "train": (
                "What is the largest order of {product}?",
                "Show the highest amount paid for {product}.",
                "What is the maximum amount for {product}?",
                "How big was the biggest {product} order?",
            ),
            "held_out": (
                "What is the highest {product} order amount?",
                "Find the maximum amount of a {product} order.",
            ),
        },
    ),
    Family(
        "SELECT id FROM orders WHERE amount > {number};",
        {
            "train": (
                "Which orders are above {number}?",
                "List the ids of orders with an amount over {number}.",
                "Show orders that cost more than {number}.",
                "Which order ids have an amount greater than {number}?",
            ),
            "held_out": (
                "List orders worth more than {number}.",
                "Which orders are over {number}?",
            ),
        },
    ),
    Family(
        "SELECT COUNT(*) FROM orders WHERE product = '{product}' AND status = '{status}';",
        {
            "train": (
                "How many {product} orders are {status}?",
                "Count the {status} orders of {product}.",
                "How many orders for {product} have the status {status}?",
                "What is the number of {status} {product} orders?",
            ),
            "held_out": (
                "How many {status} {product} orders are there?",
                "Count {product} orders that are {status}.",
            ),
        },
    ),
    Family(
        f"SELECT orders.product {_JOIN} WHERE customers.name = '{{name}}';",
        {
            "train": (
                "What did {name} order?",
                "Which products did {name} buy?",
                "List the products ordered by {name}.",
                "Show everything {name} has bought.",
            ),
            "held_out": ("Which products has {name} ordered?", "List what {name} bought."),
        },
    ),
    Family(
        f"SELECT SUM(orders.amount) {_JOIN} WHERE customers.city = '{{city}}';",
        {
            "train": (
                "How much did customers from {city} spend?",
                "What is the total amount of orders from {city}?",
                "Sum the order amounts of customers in {city}.",
                "What is the revenue from customers in {city}?",
            ),
            "held_out": (
                "How much have customers in {city} spent in total?",
                "What is the total order amount of customers from {city}?",
            ),
        },
    ),
)


def make(rng: random.Random, split: Split) -> Case:
    family = rng.choice(FAMILIES)
    phrasing = pick(rng, split, family.phrasings)
    values = {name: pick(rng, split, choices) for name, choices in SLOTS.items()}
    used = {name: value for name, value in values.items() if "{" + name + "}" in family.sql}
    status = rng.choice(STATUSES)
    return Case(
        messages=(
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": phrasing.format(status=status, **used)},
        ),
        expected=family.sql.format(status=status, **used),
        slots=(("phrasing", phrasing.replace("{status}", status)), *used.items()),
    )


def fixture(seed: int) -> sqlite3.Connection:
    """A database in which every slot value occurs, and counts and sums differ between values."""
    rng = random.Random(f"polyloom fixture {seed}")
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA)
    names = [name for split in SLOTS["name"].values() for name in split]
    cities = [city for split in SLOTS["city"].values() for city in split]
    products = [product for split in SLOTS["product"].values() for product in split]
    extra = [f"Guest{n}" for n in range(40)]
    homes = cities + rng.choices(cities, k=len(names) + len(extra) - len(cities))
    rng.shuffle(homes)
    people = list(enumerate(zip(names + extra, homes, strict=True), start=1))
    database.executemany(
        "INSERT INTO customers VALUES (?, ?, ?)", [(i, name, city) for i, (name, city) in people]
    )
    wanted = [(product, status) for product in products for status in STATUSES]
    wanted += [(rng.choice(products), rng.choice(STATUSES)) for _ in range(120)]
    buyers = [i for i, _ in people] + rng.choices([i for i, _ in people], k=len(wanted))
    rows = [
        (buyers[n], product, rng.randrange(5, 200), status)
        for n, (product, status) in enumerate(wanted)
    ]
    database.executemany(
        "INSERT INTO orders (customer_id, product, amount, status) VALUES (?, ?, ?, ?)", rows
    )
    return database


def rows(query: str, seed: int) -> Counter[tuple[object, ...]] | None:
    """The rows of a model's query, or none where SQLite refuses it.

    It is untrusted text: it runs on a database of its own, may only read, and may not run for
    long.
    """
    with closing(fixture(seed)) as database:
        database.execute("PRAGMA query_only = ON")
        database.set_progress_handler(lambda: 1, _STEP_LIMIT)
        try:
            return Counter(database.execute(query).fetchall())
        except (sqlite3.Error, sqlite3.Warning):
            return None


def check(answer: str, case: Case) -> Rules:
    query = unfenced(answer)
    found = [rows(query, seed) for seed in FIXTURES]
    wanted = [rows(case.expected, seed) for seed in FIXTURES]
    return {"runs": None not in found, "rows": found == wanted}


TASK = Task(make=make, check=check)
