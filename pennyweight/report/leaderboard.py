"""Several quantizations of one model compared: error, bytes and speed, and which of them are on the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Standing:
    """One quantization. letter: its mark in the pictures; error: KL, or the relative error of the output; None:
    unknown. speed: relative to float in each timed batch. front: no other one is better in one of error, bytes and
    speed without being worse in another."""

    letter: str
    name: str
    bytes: int
    bits_per_weight: float | None
    error: float | None
    grade: str
    top1: float | None
    speed: tuple[float, ...] = ()
    front: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speed": list(self.speed)}


def letters(count: int) -> list[str]:
    """A, B, .. Z, A2, B2, .."""
    return [chr(ord("A") + i % 26) + ("" if i < 26 else str(i // 26 + 1)) for i in range(count)]


def ranked(some: Sequence[Standing]) -> list[Standing]:
    """With ``front`` set, by error and then by bytes; those without a known error last."""
    costs = [_costs(s) for s in some]
    front = [not any(_dominates(other, cost) for other in costs) for cost in costs]
    marked = [Standing(**{**vars(s), "front": f}) for s, f in zip(some, front, strict=True)]
    return sorted(marked, key=lambda s: (s.error is None, s.error or 0.0, s.bytes))


def _costs(s: Standing) -> tuple[float, ...]:
    """Smaller is better in each."""
    error = () if s.error is None else (s.error,)
    return (*error, float(s.bytes), *(-v for v in s.speed))


def _dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return len(a) == len(b) and a != b and all(x <= y for x, y in zip(a, b, strict=True))


def summary(some: Sequence[Standing]) -> str:
    """One sentence that names the choices."""
    known = [s for s in some if s.error is not None]
    calm = [s for s in known if s.grade in ("good", "fine")]
    parts = []
    if known:
        best = min(known, key=lambda s: (s.error or 0.0, s.bytes))
        parts.append(f"smallest error: {best.name}")
    if calm:
        small = min(calm, key=lambda s: s.bytes)
        parts.append(f"smallest with a {small.grade} output: {small.name}")
    else:
        parts.append(f"smallest: {min(some, key=lambda s: s.bytes).name}")
        if known:
            parts.append("none has a good or fine output")
    if all(s.speed for s in some):
        parts.append(f"fastest: {max(some, key=lambda s: s.speed[0]).name}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."
