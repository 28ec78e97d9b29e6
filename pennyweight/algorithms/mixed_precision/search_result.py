"""The result of search(): a config for each weight, with the measurements it was chosen from."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...planning.configs import FqnToConfig
from ...planning.configs.files import write_config
from ...planning.configs.serialize import config_to_data
from ...planning.quantize_report import duration, size, speed_of_float
from ...support.tables import FLAG, REAL, TEXT, WHOLE, html_table, to_frame
from .budget import Base, Budget, Table, allocate, check, limits, merge, totals

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class Search:
    """Result of :func:`search`.

    config      ready for ``quantize_``; a plain FqnToConfig that can be read, saved (:meth:`save`) and edited
    predicted   predicted loss of the model: the sum of its layers' losses times ``interaction``
    interaction measured loss of the chosen allocation divided by the sum of its layers' losses
    bits        per weight of the quantized layers, metadata included
    table       options by parameter
    uniform     (config, bits per weight, sum of losses) of each candidate applied to all weights
    base        reference values of budgets
    seconds     of one call of the quantized model; None without a latency budget
    fused       names of the parameters that share one choice, a tuple for each group
    """

    config: FqnToConfig
    predicted: float
    interaction: float
    bits: float
    nbytes: int
    chosen: dict[str, int]
    table: Table = field(repr=False)
    uniform: list[tuple[str, float, float]] = field(default_factory=list)
    metric: str = "kl"
    base: Base = field(default_factory=lambda: Base(0, 0))
    seconds: float | None = None
    fused: tuple[tuple[str, ...], ...] = ()

    @property
    def speed(self) -> float | None:
        """Speed relative to the float model; None without a latency budget."""
        return None if self.seconds is None or self.base.seconds is None else self.base.seconds / self.seconds

    def within(self, budget: Budget) -> Search:
        """The best allocation within another budget, from the same measurements, without running the model. Keeps the
        ``interaction`` of this result. Raises PlanError as :func:`search` does, and for a latency budget if this search
        had none, because nothing was timed."""
        limit = limits(budget, self.base)
        check(merge(self.table, self.fused)[0], limit, self.base)
        chosen = allocate(self.table, limit, self.fused)
        nbytes, total, seconds = totals(self.table, chosen)
        return replace(
            self, config=config_of(self.table, chosen), predicted=total * self.interaction,
            bits=8 * nbytes / self.base.numel, nbytes=nbytes, chosen=chosen, seconds=whole_seconds(self.base, seconds),
        )  # fmt: skip

    def to_json(self, indent: int | None = 2) -> str:
        """The config as JSON (see PennyweightConfig) with the table of options."""
        table = {
            name: [{"scheme": o.scheme, "nbytes": o.nbytes, "loss": o.loss, "seconds": o.seconds,
                    "chosen": i == self.chosen[name]} for i, o in enumerate(options)]
            for name, options in self.table.items()
        }  # fmt: skip
        data = {
            "version": 1, "config": config_to_data(self.config), "bits": self.bits, "nbytes": self.nbytes,
            "metric": self.metric, "predicted": self.predicted, "interaction": self.interaction,
            "seconds": self.seconds, "float_seconds": self.base.seconds, "table": table,
        }  # fmt: skip
        return json.dumps(data, indent=indent)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the config to a .yaml or .json file, for ``pw.quantize_(model, path)`` and ``--config path``."""
        write_config(self.config, path)

    def front(self, points: int = 12) -> list[tuple[float, float]]:
        """(bits per weight, predicted loss) of the best allocations from the smallest to the largest size, ignoring
        latency."""
        merged = merge(self.table, self.fused)[0]
        least = sum(min(o.nbytes for o in options) for options in merged.values())
        most = sum(max(o.nbytes for o in options) for options in merged.values())
        found = []
        for i in range(points):
            limit = least + (most - least) * i / max(1, points - 1)
            chosen = allocate(self.table, limit, self.fused)
            nbytes, loss, _ = totals(self.table, chosen)
            found.append((8 * nbytes / self.base.numel, loss * self.interaction))
        return found

    def to_pandas(self) -> DataFrame:
        """A data frame with a row for each parameter and each of its options: whether it was chosen, scheme, bytes,
        loss of the model with only this weight quantized, and the seconds of its layers in one call if they were timed.
        Raises ImportError without pandas."""
        types = {"name": TEXT, "scheme": TEXT, "spec": TEXT, "chosen": FLAG, "bytes": WHOLE, "loss": REAL,
                 "seconds": REAL}  # fmt: skip
        rows = [
            {"name": name, "scheme": o.short, "spec": o.scheme, "chosen": i == self.chosen[name], "bytes": o.nbytes,
             "loss": o.loss, "seconds": o.seconds}
            for name, options in self.table.items() for i, o in enumerate(options)
        ]  # fmt: skip
        return to_frame(types, rows, bits=self.bits, metric=self.metric, predicted=self.predicted)

    def summary(self) -> str:
        """One line."""
        text = f"{self.bits:.3f} bits per weight, {size(self.nbytes)}; predicted {self.metric} {self.predicted:.3g}"
        if self.seconds is not None and self.speed is not None:
            text += f"; {duration(self.seconds)} per call, {speed_of_float(self.speed)}"
        return text

    def __repr__(self) -> str:
        counts = Counter(options[self.chosen[name]].short for name, options in self.table.items())
        return f"<Search: {self.summary()}; {', '.join(f'{n} × {text}' for text, n in counts.most_common(5))}>"

    def _repr_html_(self) -> str:
        columns, rows = self._cells()
        return html_table(columns, rows, title=self.summary(), right=("bytes", "time", self.metric))

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console
        from rich.table import Table as Drawn
        from rich.text import Text

        columns, rows = self._cells()
        table = Drawn(title=Text(self.summary()), title_justify="left")
        for name in columns:
            left = name in ("parameter", "chosen", "others")
            table.add_column(name, justify="left" if left else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        out = StringIO()
        Console(file=out, width=120).print(table)
        return out.getvalue()

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        timed = ["time"] if self.seconds is not None else []
        rows = []
        for name, options in self.table.items():
            one = options[self.chosen[name]]
            rest = ", ".join(f"{o.short.split(',')[0]} {o.loss:.2g}" for o in options if o is not one)
            took = [duration(one.seconds or 0.0)] if timed else []
            rows.append([name, one.short, size(one.nbytes), *took, f"{one.loss:.2g}", rest])
        return ["parameter", "chosen", "bytes", *timed, self.metric, "others"], rows


def config_of(table: Table, chosen: dict[str, int]) -> FqnToConfig:
    """The config that applies the chosen option of each parameter."""
    return FqnToConfig({name: table[name][i].config for name, i in chosen.items()})


def whole_seconds(base: Base, seconds: float | None) -> float | None:
    """Of one call of the model: those of its searched layers, and the rest."""
    return None if seconds is None else seconds + base.rest_seconds
