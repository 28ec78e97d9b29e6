"""Checks of arguments of public functions, one function per kind of argument, and the texts of their messages.

A message names the argument, says what was given and what is expected, and how to get there. Checks of models, tensors
and dtypes, and the decorator that applies checks to a function, are in pennyweight/core/model_arguments.py.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from .errors import ArgumentTypeError

# -- text --------------------------------------------------------------------------------------------------------------

_MAX = 60  # characters of a value in a message


def did_you_mean(word: object, known: Iterable[str], n: int = 3, cutoff: float = 0.5) -> str:
    """ " (did you mean 'a' or 'b'?)" with up to ``n`` similar names of ``known``; "" if none is similar.

    cutoff: least similarity, see difflib.get_close_matches. Case does not count.
    """
    return hint(close_names(word, known, n, cutoff))


def hint(close: Iterable[str]) -> str:
    """ " (did you mean 'a' or 'b'?)" for names that were found to be similar; "" for none."""
    text = " or ".join(map(repr, close))
    return f" (did you mean {text}?)" if text else ""


def close_names(word: object, known: Iterable[str], n: int = 3, cutoff: float = 0.5) -> list[str]:
    """Up to ``n`` names that are similar to ``word``, the most similar first."""
    from difflib import SequenceMatcher

    wanted, scores = str(word).lower(), {}
    for name in known:
        ratio = SequenceMatcher(None, name.lower(), wanted).ratio()
        if len(wanted) > 3 and name.lower().startswith(wanted):  # the beginning of a name
            ratio = 1.0
        if ratio >= cutoff:
            scores[name] = ratio
    return sorted(scores, key=lambda name: -scores[name])[:n]


_DESCRIBE: list[Callable[[object], str]] = []  # one, set in core/model_arguments.py


def describe_with(describe: Callable[[object], str]) -> None:
    """Register how messages quote values of classes that this file does not know: (value) -> text, "" for others."""
    _DESCRIBE[:] = [describe]


def _described(value: object) -> str:
    return next((describe(value) for describe in _DESCRIBE), "")


def show(value: object) -> str:
    """A value as messages quote it: its text if that is short, else its type and size."""
    if text := _described(value):
        return text
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', value)}"
    if isinstance(value, (list, tuple, dict)) and len(text := repr(value)) > _MAX:
        return f"a {type(value).__name__} of {len(value)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}"
    text = str(value) if hasattr(value, "__dataclass_fields__") else repr(value)
    if text.startswith("<"):  # the default repr, with an address
        return f"{type(value).__name__}"
    return text if len(text) <= _MAX else f"{text[: _MAX - 3]}..."


# -- kinds of arguments ------------------------------------------------------------------------------------------------


def check_nothing(name: str, value: object) -> None:
    """For a parameter that is checked elsewhere."""


def check_path(name: str, value: object) -> None:
    """Raise ArgumentTypeError unless the value is a path."""
    if not isinstance(value, (str, os.PathLike)):
        order = "; check the order of the arguments" if isinstance(value, Mapping) or _described(value) else ""
        raise ArgumentTypeError(f"{name} must be the path of a file or folder, got {show(value)}{order}")


def check_folder(name: str, value: object, create: bool = False) -> None:
    """Raise ArgumentTypeError unless the value is None or a path, ValueError unless that is a folder.

    create  the folder, and its parents, may be missing
    """
    if value is None:
        return
    check_path(name, value)
    path: Any = value
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(f"{name}={str(value)!r} is a file; pass a folder")
    if not create and not os.path.isdir(path):
        raise ValueError(f"{name}={str(value)!r}: there is no such folder; create it first")


def check_optional_path(name: str, value: object) -> None:
    """Like :func:`check_path`; None is allowed."""
    if value is not None:
        check_path(name, value)


def check_progress(name: str, value: object) -> None:
    """Raise ArgumentTypeError unless the value is None, a bool, or a function."""
    if value is not None and not isinstance(value, bool) and not callable(value):
        raise ArgumentTypeError(f"{name} must be a function (done, total, name), True or False, got {show(value)}")


def check_names(name: str, value: object) -> None:
    """Raise ArgumentTypeError unless the value is a list of names."""
    if isinstance(value, str):
        raise ArgumentTypeError(f"{name} must be a list of names, got {value!r}; write {name}=[{value!r}]")
    if _described(value) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"{name} must be a list of names, got {show(value)}")
    if wrong := [word for word in value if not isinstance(word, str)]:
        raise ArgumentTypeError(f"{name} must be a list of names, got {show(value)}: {show(wrong[0])} is not a name")


def check_skip(name: str, value: object) -> None:
    """Raise ArgumentTypeError unless the value is a list of names or a function."""
    if not callable(value) or isinstance(value, type) or _described(value):
        check_names(name, value)


def check_number(
    name: str, value: object, least: float | None = None, below: float | None = None, *, integer: bool = False,
    positive: bool = False,
) -> None:  # fmt: skip
    """Raise ArgumentTypeError unless the value is a number, ValueError unless it is in the range.

    integer    a whole number; booleans are none
    positive   above 0;  least: at least;  below: less than
    """
    kind = "an integer" if integer else "a number"
    if integer:
        right = hasattr(type(value), "__index__") and not isinstance(value, bool) and not _described(value)
    else:
        right = isinstance(value, Real) and not isinstance(value, bool)
    bounds = [f"of at least {least}"] if least is not None else []
    bounds += [f"below {below}"] if below is not None else []
    wanted = " ".join([f"a positive {kind.split()[1]}" if positive else kind, " and ".join(bounds)]).strip()
    if not right:
        quoted = " without quotes" if isinstance(value, str) and value.strip(" +-").replace(".", "").isdigit() else ""
        raise ArgumentTypeError(f"{name} must be {wanted}, got {show(value)}{f'; write it{quoted}' if quoted else ''}")
    number: Any = value
    inside = number > 0 if positive else number >= float("-inf")  # NaN is not inside
    inside = inside and (least is None or number >= least)
    if not inside or (below is not None and number >= below):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raise ValueError unless the value is one of the known words."""
    if value not in known:
        guess = did_you_mean(value, known, 1, 0.6)
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}{guess}")


def check_bytes(name: str, value: object) -> None:
    """Raise unless the value is a positive number of bytes."""
    check_number(name, value, integer=True, positive=True)
