"""Values that no setting should have, put into every place of a JSON value."""

from collections.abc import Iterator
from typing import Any

Place = tuple[Any, ...]

JUNK: list[Any] = [
    None, True, 0, -7, 32.5, 2**40, 1e300, "32", "x" * 5000, [2**40, 2**40], ["x"], {"a": 1},
    {"_type": "PerRow", "_data": {}}, {"_type": "torch.dtype", "_data": ["x"]},
]  # fmt: skip


def leaves(value: Any, place: Place = ()) -> Iterator[Place]:
    """Every place in it, itself first."""
    yield place
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*place, key))
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from leaves(one, (*place, i))


def replaced(value: Any, place: Place, new: Any) -> Any:
    """A copy with another value in that place."""
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(copy[place[0]], place[1:], new)
    return copy
