"""Report: what happened to every parameter. print() shows a table, to_json() serializes it, check() enforces limits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.model_arguments import ReturnedInPlaceOfModel
from ..support.tables import ANY, FLAG, REAL, TEXT, WHOLE, html_table, text_table, to_frame

if TYPE_CHECKING:
    from pandas import DataFrame

# A layer counts as slower than float above this ratio of times: the noise between two measurements of one thing.
NOISE = 1.05
# Attribute of a model, and key in the metadata of its files: the algorithm that chose its codes, if one did
ALGORITHM = "pennyweight_algorithm"
# In notes of weights that take more memory than int8, or than float
LARGER = "larger than"


@dataclass(frozen=True)
class Latency:
    """Microseconds of one call of a layer, float and quantized, timed in turns.

    rows   rows of input of a linear layer; of a convolution, positions: samples times spatial sizes
    shape  of the input of a convolution; () for a linear layer
    """

    rows: int
    float_us: float
    quantized_us: float
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int | tuple[int, ...]:
        """Of the input: the rows, or the shape of a convolution's input."""
        return self.shape or self.rows

    @property
    def label(self) -> str:
        """The size as text: "64", "1×3×32×32"."""
        return "×".join(map(str, self.shape)) or str(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without ``shape`` for a linear layer."""
        return {name: list(v) if name == "shape" else v for name, v in asdict(self).items() if v != ()}

    @property
    def speed(self) -> float:
        """Relative to float: above 1 is faster."""
        return self.float_us / self.quantized_us

    @property
    def text(self) -> str:
        """As "64 rows: 1.7x faster"."""
        rows = "" if self.shape else " row" if self.rows == 1 else " rows"
        return f"{self.label}{rows}: {relative_speed(self.speed)}"

    @property
    def slower(self) -> bool:
        """True if it is slower than float by more than the measurement noise."""
        return self.quantized_us > NOISE * self.float_us


@dataclass
class Row:
    """One parameter. bytes_* are true storage; sqnr is the weight's, in dB; note is a remark for the user; latency is
    present if it was requested and the layer could be timed; error is the error of the layer's output on the
    calibration data, E|(Wq - W) x|^2, as a fraction of round-to-nearest's."""

    name: str
    type: str
    shape: tuple[int, ...]
    scheme: str  # "" if the parameter was left alone
    kernel: str
    bytes_before: int
    bytes_after: int
    sqnr: float | None = None
    note: str = ""
    latency: tuple[Latency, ...] = ()
    error: float | None = None
    scheme_text: str = ""  # the scheme in words
    scheme_short: str = ""  # the same for tables: "int4, groups of 64"

    @property
    def quantized(self) -> bool:
        return bool(self.scheme)

    @property
    def short(self) -> str:
        """The scheme in as few words as a table has room for; "" if the parameter was left alone."""
        return self.scheme_short or self.scheme_text or self.scheme


@dataclass(repr=False)
class Report(ReturnedInPlaceOfModel):
    """One row per parameter in the model's order; tied parameters appear once, under their first name. notes: remarks
    about the whole model.

    ``print(report)`` shows a table, :meth:`to_string` with ``full=True`` every layer and every detail of its scheme;
    a notebook shows it as HTML; :meth:`to_pandas`, :meth:`to_dict` and :meth:`to_json` are for programs.
    """

    config: str
    rows: list[Row] = field(default_factory=list)
    verb: str = "quantized"
    notes: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> list[Row]:
        return [r for r in self.rows if r.quantized]

    @property
    def skipped(self) -> list[Row]:
        """Parameters left alone, each with its reason in ``note``."""
        return [r for r in self.rows if not r.quantized]

    @property
    def slower(self) -> list[Row]:
        """Quantized layers measured slower than float at one of the numbers of rows."""
        return [r for r in self.quantized if any(t.slower for t in r.latency)]

    @property
    def bytes_before(self) -> int:
        return sum(r.bytes_before for r in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(r.bytes_after for r in self.rows)

    @property
    def fraction(self) -> float:
        """Share of the parameter bytes that was quantized."""
        return sum(r.bytes_before for r in self.quantized) / max(1, self.bytes_before)

    def check(self, *, min_sqnr: float | None = None, min_fraction: float | None = None) -> Report:
        """Raise ValueError, with the layers' names, if the SQNR of a weight is below ``min_sqnr`` dB, or if less than
        ``min_fraction`` of the bytes was quantized. Returns itself."""
        if min_sqnr is not None:
            bad = [r for r in self.quantized if r.sqnr is not None and r.sqnr < min_sqnr]
            if bad:
                worst = ", ".join(f"{r.name} ({r.sqnr:.1f} dB)" for r in sorted(bad, key=lambda r: r.sqnr or 0)[:5])
                raise ValueError(
                    f"{len(bad)} weights are below {min_sqnr} dB: {worst}; give them more bits or skip them"
                )
        if min_fraction is not None and self.fraction < min_fraction:
            left = ", ".join(r.name for r in sorted(self.skipped, key=lambda r: -r.bytes_before)[:5])
            raise ValueError(
                f"only {self.fraction:.0%} of the bytes were quantized, {min_fraction:.0%} required; largest left "
                f"unquantized: {left}"
            )
        return self

    def summary(self) -> str:
        """One line."""
        q, s = len(self.quantized), len(self.skipped)
        large = sum(LARGER in r.note for r in self.quantized)
        before, after = self.bytes_before, self.bytes_after
        line = f"{q} parameters {self.verb}, {s} left alone; {size(before)} -> {size(after)}"
        if after and before:
            larger, ratio = after > before, max(before, after) / min(before, after)
            line += f" ({ratio:.2f}x {'larger' if larger else 'smaller'})" if ratio >= 1.005 else " (same size)"
        line += f"; {large} {'is' if large == 1 else 'are'} {LARGER} int8 or float" if large else ""
        return line + (f"; {len(self.slower)} are slower than float here" if self.slower else "")

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(r), "shape": list(r.shape), "latency": [t.to_dict() for t in r.latency]} for r in self.rows]
        for row in rows:
            del row["scheme_short"]  # it follows from "scheme"
            if row["sqnr"] is not None and not math.isfinite(row["sqnr"]):
                row["sqnr"] = "inf"  # JSON has no infinity; weights quantized without error have it
        return {
            "version": 1, "config": self.config, "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after, "notes": self.notes, "rows": rows,
        }  # fmt: skip

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_pandas(self) -> DataFrame:
        """A data frame with a row for each parameter: its name, type, shape, scheme in words, spec in full, kernel,
        bytes, SQNR in dB, error as a fraction of round-to-nearest's, note, and the speed relative to float at each
        measured size ("speed_64"). Raises ImportError without pandas."""
        sizes = list(dict.fromkeys(t.label for r in self.rows for t in r.latency))
        types = {
            "name": TEXT, "type": TEXT, "shape": ANY, "quantized": FLAG, "scheme": TEXT, "spec": TEXT, "kernel": TEXT,
            "bytes_before": WHOLE, "bytes_after": WHOLE, "sqnr_db": REAL, "error": REAL, "note": TEXT,
            **{f"speed_{label}": REAL for label in sizes},
        }  # fmt: skip
        rows = []
        for r in self.rows:
            speeds = {f"speed_{label}": None for label in sizes} | {f"speed_{t.label}": t.speed for t in r.latency}
            rows.append({**vars(r), "quantized": r.quantized, "scheme": r.short, "spec": r.scheme, "sqnr_db": r.sqnr,
                         **speeds})  # fmt: skip
        return to_frame(types, rows, config=self.config)

    def __repr__(self) -> str:
        schemes = list(dict.fromkeys(r.short for r in self.quantized))
        how = f"; {', '.join(schemes[:3])}{' and others' if len(schemes) > 3 else ''}" if schemes else ""
        known = [r for r in self.quantized if r.sqnr is not None]
        worst = min(known, key=lambda r: r.sqnr or 0.0, default=None)
        loss = "" if worst is None else f"; lowest SQNR {worst.sqnr:.1f} dB ({worst.name})"
        return f"<{type(self).__name__}: {self.summary()}{how}{loss}>"

    def _repr_html_(self) -> str:
        folds = len(self.quantized) > FOLD_ABOVE
        columns, rows = self._cells(layers=not folds, specs=False)
        notes = [self.summary(), *self.notes, *([_HINT] if folds else [])]
        return html_table(columns, rows, title=self._title(full=False), notes=notes, right=_RIGHT)

    def __str__(self) -> str:
        return self.to_string()

    def to_string(self, *, full: bool = False) -> str:
        """The report as text. full: every layer, and its scheme in full; default: schemes in words, and layers that
        differ only in a number of their name share a line if there are more than ``FOLD_ABOVE``."""
        return self._text(layers=full or len(self.quantized) <= FOLD_ABOVE, specs=full)

    def table(self, *, full: bool = True) -> str:
        """The report as text. With ``full=False``, layers whose names differ only in a number share a line, which shows
        their count, their total bytes, and the minimum and maximum SQNR. "speed" compares the times of the layer and of
        the float layer, for each measured number of rows; the column is absent if nothing was measured. "error/nearest"
        is the squared error of the layer's output on the calibration data divided by that of round-to-nearest."""
        return self._text(layers=full, specs=False)

    def _text(self, layers: bool, specs: bool) -> str:
        columns, rows = self._cells(layers, specs)
        if len(rows) > LINES and not layers:  # many layers, all of them different
            left = len(rows) - LINES + 1
            more = [f"… {left} lines", *[""] * (len(columns) - 1)]
            rows = [*rows[: LINES - TAIL - 1], more, *rows[-TAIL:]]
        caption = "\n".join((self.summary(), *self.notes, *([] if layers else [_HINT])))
        return text_table(
            columns, rows, right=_RIGHT, title=self._title(full=specs), caption=caption, drop=_DROP, whole=specs
        )

    def _title(self, full: bool) -> str:
        """The config; unless ``full``, a long one without its arguments, such as the layers of a mixture."""
        if full or len(self.config) <= _TITLE:
            return self.config
        head, _, rest = self.config.partition("(")
        return f"{head}(...){rest.rpartition(')')[2]}"

    def _cells(self, layers: bool, specs: bool) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of the table. layers: a row for each; specs: schemes in full."""
        speed = ["speed"] if any(r.latency for r in self.rows) else []
        error = ["error/nearest"] if any(r.error is not None for r in self.rows) else []
        columns = ["parameter", "shape", "scheme", "kernel", "before", "after", "SQNR dB", *error, *speed, "note"]
        lines = []
        for name, rows in _groups(self.quantized, lambda r: r.name if layers else _numberless(r)).items():
            one = rows[0]
            times = [_range(rows, "error", 2)] if error else []
            times += ["\n".join(t.text for t in one.latency)] if speed else []
            first = (name, "×".join(map(str, one.shape)), one.scheme if specs else one.short, one.kernel, *_sizes(rows))
            lines.append([*first, _range(rows, "sqnr", 1), *times, one.note])
        for note, rows in _groups(self.skipped, lambda r: r.note).items():
            name = rows[0].name if len(rows) == 1 else f"{rows[0].name} and {len(rows) - 1} more"
            times = ["" for _ in (*error, *speed)]
            lines.append([name, "", "left alone", "", *_sizes(rows), "", *times, note])
        return columns, lines


# Models with more quantized layers than this are printed folded.
FOLD_ABOVE = 24
LINES, TAIL = 60, 10  # of a folded table, and of its end
_RIGHT = ("shape", "before", "after", "SQNR dB", "error/nearest")
_DROP = ("kernel", "shape")  # in a narrow terminal
_TITLE = 120  # characters of a config above a table
_HINT = "layers are grouped by name; report.to_string(full=True) lists each, report.to_pandas() is a data frame"


def _numberless(row: Row) -> tuple[Any, ...]:
    name = ".".join("*" if part.isdigit() else part for part in row.name.split("."))
    return name, row.shape, row.scheme, row.kernel, row.note, row.latency


def _groups(rows: list[Row], key: Callable[[Row], Any]) -> dict[str, list[Row]]:
    """Rows grouped by key, in order of first appearance, under a label."""
    found: dict[Any, list[Row]] = {}
    for r in rows:
        found.setdefault(key(r), []).append(r)
    named: dict[str, list[Row]] = {}
    for k, group in found.items():
        label = k if isinstance(k, str) else group[0].name if len(group) == 1 else f"{k[0]} ({len(group)})"
        named[label if label not in named else f"{label} {group[0].name}"] = group
    return named


def _sizes(rows: list[Row]) -> tuple[str, str]:
    return size(sum(r.bytes_before for r in rows)), size(sum(r.bytes_after for r in rows))


def _range(rows: list[Row], name: str, digits: int) -> str:
    values = [getattr(r, name) for r in rows if getattr(r, name) is not None]
    if not values:
        return ""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def relative_speed(ratio: float) -> str:
    """A ratio of speeds in words: "1.7x faster", "2x slower", "same speed" within the noise of measurements."""
    if 1 / NOISE <= ratio <= NOISE:
        return "same speed"
    times = ratio if ratio > 1 else 1 / ratio
    return f"{times:.3g}x {'faster' if ratio > 1 else 'slower'}"


def speed_of_float(ratio: float) -> str:
    """A speed next to the float model's: "1.7x faster than float", "same speed as float"."""
    text = relative_speed(ratio)
    return f"{text} {'as' if text == 'same speed' else 'than'} float"


def size(n: float) -> str:
    """Bytes as text: 1.5 kB, 22.7 MB; powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Seconds as text: 2.5 h, 48 min, 1.5 s, 20 ms, 800 µs."""
    if seconds >= 6000:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 100:
        return f"{seconds / 60:.0f} min"
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


_AMOUNT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?) *([a-zA-Z]*)")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def nbytes_of(text: str | float) -> int:
    """Parse a size: "4GB", "1.5 GiB", "500_000", or a number of bytes. Raises ValueError."""
    match = _AMOUNT.fullmatch(str(text).strip()) if type(text) in (str, int, float) else None
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 4GB, 500MB or 2GiB")
    found = int(float(match[1]) * _UNITS[match[2].upper()])
    if found < 1:
        raise ValueError(f"a size must be at least one byte, got {text!r}")
    return found
