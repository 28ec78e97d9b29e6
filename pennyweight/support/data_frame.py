"""Results as pandas data frames. pandas is optional: it is imported when a frame is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

TEXT, WHOLE, REAL, FLAG, ANY = "str", "Int64", "Float64", "boolean", "object"  # nullable types of pandas


def to_frame(types: Mapping[str, str], rows: Sequence[Mapping[str, Any]], **attrs: Any) -> DataFrame:
    """A data frame with a column for each of ``types``, of that dtype, and a row for each of ``rows``; None becomes
    missing. ``attrs``: facts about the whole frame, in its ``attrs``. Raises ImportError, with the remedy, without
    pandas."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas; install it with: pip install pandas") from error
    columns = {
        name: pandas.Series([row[name] for row in rows], dtype="string" if kind == TEXT else kind)
        for name, kind in types.items()
    }
    frame = pandas.DataFrame(columns)
    frame.attrs.update(attrs)
    return frame
