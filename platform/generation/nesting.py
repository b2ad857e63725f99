"""How deep a client's JSON may be nested."""

MAX_LEVELS = 100
"""Whatever reads it later, templates and grammars too, recurses: well below where any of them ends."""


def nested_too_deeply(value: object) -> bool:
    """Whether decoded JSON has more than MAX_LEVELS objects and lists within each other."""
    level = [value]
    for _ in range(MAX_LEVELS):
        level = [child for node in level for child in _containers(node)]
        if not level:
            return False
    return True


def _containers(node: object) -> list[object]:
    if isinstance(node, dict):
        return [child for child in node.values() if isinstance(child, (dict, list))]
    if isinstance(node, list):
        return [child for child in node if isinstance(child, (dict, list))]
    return []
