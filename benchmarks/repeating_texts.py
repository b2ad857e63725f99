"""Prompts whose continuations repeat them, and prose whose do not."""

_NOTES = (
    """Meeting notes, Tuesday. Anna reported that the order service was moved to the new cluster
without downtime. The invoices of March are late because two suppliers changed their bank details.
Peter will call both before Friday. The kitchen on the third floor stays closed until the water
pipe has been replaced; coffee is served on the second floor. Next meeting: Thursday at ten.""",
    """Packing list for the exhibition: twelve oak frames, four lamps with spare bulbs, the long
ladder, two rolls of grey cloth, a box of brass hooks, and the folder with the loan contracts. The
van leaves at seven from the north gate. Keys are with Mrs. Larsen. The curator of the museum in
Bergen expects us before noon and will have six people ready to carry the crates upstairs.""",
    """Terms of the rental: the tenant pays 840 euros on the third working day of each month. Water
and heating are included, electricity is not. Two keys were handed over on 1 February. The tenant
may keep one cat. Damage to the floor in the hall, noted on arrival, is not charged to the tenant.
The contract runs for two years and is renewed unless one side ends it three months before.""",
)

COPIES = tuple(
    f"{note}\n\nThe same text again, word for word:\n\n{note}\n\nAnd once more:\n\n{note[:120]}"
    for note in _NOTES
)
"""The rest of the note is to come."""

_MODULES = (
    '''class Stock:
    """Counts items by name."""

    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if self.items.get(name, 0) < count:
            raise ValueError("not enough items")
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())
''',
    """def read_rows(path, separator):
    rows = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            fields = line.rstrip("\\n").split(separator)
            if len(fields) < 3:
                continue
            rows.append((fields[0], int(fields[1]), float(fields[2])))
    return rows


def largest(rows):
    best = None
    for name, count, price in rows:
        if best is None or count * price > best[1]:
            best = (name, count * price)
    return best
""",
)

CODE_EDITS = tuple(
    f"```python\n{module}```\n\nThe same module with type annotations:\n\n"
    f"```python\n{module}```\n\nThe same module with one more comment:\n\n```python\n{module[:60]}"
    for module in _MODULES
)
"""The module is to be written again."""

PROSE = (
    "Once upon a time there was a lighthouse keeper who collected clocks. One winter",
    "The history of bread begins long before ovens were built. In the earliest villages",
    "Dear friends, I am writing to tell you about our journey through the mountains, where",
)
