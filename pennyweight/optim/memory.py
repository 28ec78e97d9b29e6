"""Memory report of optimizer states."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Bytes of the current states on this rank.

    quantized, floats  bytes of quantized states and of float states (small parameters)
    float32            bytes of the same states in float32
    parameters         number of parameters with states: (quantized, float)
    slow               reason for not using the native step -> number of parameters, at the last step
    """

    quantized: int
    floats: int
    float32: int
    parameters: tuple[int, int]
    slow: dict[str, int]

    @property
    def ratio(self) -> float:
        """State bytes relative to float32."""
        return (self.quantized + self.floats) / self.float32 if self.float32 else 0.0

    def __str__(self) -> str:
        rows = [
            ("states", "parameters", "bytes"),
            ("quantized", str(self.parameters[0]), f"{self.quantized:,}"),
            ("float32 (small parameters)", str(self.parameters[1]), f"{self.floats:,}"),
            ("all of them in float32", str(sum(self.parameters)), f"{self.float32:,}"),
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
        lines.append(f"{self.ratio:.3f} of float32")
        lines += [f"slower reference step: {n} parameter(s), {why}" for why, n in self.slow.items()]
        return "\n".join(lines)
