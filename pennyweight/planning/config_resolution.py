"""Selects the config of each parameter, by a filter over modules or by name, and the parameters to skip."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

from torch import nn

from ..core.model_arguments import ReturnedInPlaceOfModel
from ..support.arguments import check_skip, close_names, did_you_mean, hint, show
from ..support.errors import ArgumentTypeError
from .configs import AOBaseConfig, FqnToConfig
from .configs.by_name import by_name, named
from .configs.files import is_config_file, read_config
from .name_patterns import NamePattern
from .parameters import Place, computed_from, is_linear, kind_of

Filter = Callable[[nn.Module, str], bool]


class PlanError(ValueError):
    """A config that cannot be applied as given; the message contains the layer or pattern, and a remedy."""


Left = Literal["", "filtered", "skipped"]  # why a parameter is left alone: the filter, or skip= and None in a config


class Choice(NamedTuple):
    """The config of a parameter (None: left alone, reason in ``why``), and the place by which it was selected."""

    config: AOBaseConfig | None
    place: Place
    key: str = ""  # of FqnToConfig
    named: bool = False  # selected by the parameter's own name
    why: str = ""
    left: Left = ""


Skip = Sequence[str] | Callable[[list[Place], Choice], str]


def resolve_config(config: Any) -> AOBaseConfig:
    """A config object, from itself, its short name ("int4", "int4:32") or the path of its file ("mixed.yaml"). Raises
    PlanError for an unknown name, ArgumentTypeError for anything else."""
    if isinstance(config, str):
        try:
            if is_config_file(config):
                return read_config(config)
            made: AOBaseConfig = named(config) if ":" in config else by_name(config)
            return made
        except ValueError as error:
            raise PlanError(str(error)) from error
    if not isinstance(config, AOBaseConfig):
        raise ArgumentTypeError(not_a_config("config", config))
    return config


def not_a_config(name: str, value: Any) -> str:
    """The message for an argument that is not a config, with the remedy for what it is instead."""
    if isinstance(value, type) and issubclass(value, AOBaseConfig):
        remedy = f"; call the class: {value.__name__}()"
    elif isinstance(value, Mapping):
        remedy = "; for configs by layer name write FqnToConfig({...})"
    elif isinstance(value, ReturnedInPlaceOfModel):
        remedy = "; pass the config that it was made with, and the same filter_fn and skip"
    else:
        remedy = ""
    return (
        f'{name} must be a config such as Int8WeightOnlyConfig(), or a name such as "int8"; got {show(value)}{remedy}'
    )


def read_candidates(candidates: Any, default: Sequence[AOBaseConfig]) -> list[AOBaseConfig]:
    """The configs of an argument ``candidates``: a list of configs and short names, or None for the default."""
    if candidates is None:
        return list(default)
    if isinstance(candidates, (str, AOBaseConfig)) or not isinstance(candidates, Iterable):
        raise ArgumentTypeError(f"candidates must be a list of configs, got {show(candidates)}; write [config, ...]")
    found = []
    for i, one in enumerate(candidates):
        config = named(one)
        if not isinstance(config, AOBaseConfig):
            raise ArgumentTypeError(not_a_config(f"candidates[{i}]", one))
        found.append(config)
    if not found:
        raise PlanError("candidates is empty; pass at least one config, or leave it out")
    return found


def resolve_arguments(config: Any, skip: Skip, on_indivisible: str) -> tuple[AOBaseConfig, Skip, str]:
    """(config, skip, on_indivisible) of a call. A PennyweightConfig holds all three (``quantize_arguments``): the call
    must not pass them too. Raises PlanError."""
    if hasattr(config, "quantize_arguments") and not isinstance(config, type):
        if skip or on_indivisible != "pad":
            raise PlanError(f"{type(config).__name__} already holds skip and on_indivisible; pass them there")
        given = config.quantize_arguments()
        config, skip, on_indivisible = given["config"], given["skip"], given["on_indivisible"]
    return resolve_config(config), skip, on_indivisible


EMBEDDINGS = "_embeddings"  # the key of FqnToConfig for embeddings, as "_default" is for linear modules


def _is_embedding(module: nn.Module) -> bool:
    kind = kind_of(module)
    return kind is not None and kind.op == "embedding"


class Rules(Protocol):
    """choose: the config of a parameter, given all its places. of_module: the config of a module, for module handlers.

    check_keys: raise PlanError for a key that matches nothing, or nothing that its config applies to.
    """

    def choose(self, places: list[Place]) -> Choice: ...
    def of_module(self, name: str, module: nn.Module) -> AOBaseConfig | None: ...
    def check_keys(self, places: list[Place], modules: list[str], handled: Collection[type]) -> None: ...


def rules(config: AOBaseConfig, filter_fn: Filter | None) -> Rules:
    """The rules of a config and a filter."""
    if not isinstance(config, FqnToConfig):
        return ByFilter(config, filter_fn)
    if filter_fn not in (None, is_linear):
        raise PlanError("FqnToConfig selects layers by name; leave filter_fn out, or use a None value to skip")
    return ByName(config.fqn_to_config)


class ByFilter:
    """One config for the modules that a filter selects; default: linear ones."""

    def __init__(self, config: AOBaseConfig, filter_fn: Filter | None) -> None:
        self.config, self.filter = config, filter_fn
        self._picked: dict[str, bool] = {}

    def _picks(self, name: str, module: nn.Module) -> bool:
        if name not in self._picked:
            self._picked[name] = bool((self.filter or is_linear)(module, name))
        return self._picked[name]

    def choose(self, places: list[Place]) -> Choice:
        picked = [p for p in places if self._picks(p.module_name, p.module)]
        if picked:
            return Choice(self.config, next((p for p in picked if p.own), picked[0]))
        if is_linear(places[0].module) and places[0].own:
            return Choice(None, places[0], why="filtered out", left="filtered")
        return Choice(None, places[0], why=f"{_type(places[0])}: not selected by default")

    def of_module(self, name: str, module: nn.Module) -> AOBaseConfig | None:
        if self.filter is None:  # by default a handler gets nn.Linear only
            return self.config if isinstance(module, nn.Linear) else None
        return self.config if self._picks(name, module) else None

    def check_keys(self, places: list[Place], modules: list[str], handled: Collection[type]) -> None:
        pass


class ByName:
    """FqnToConfig: exact parameter names, exact module names, patterns in order, ``_embeddings``, ``_default``."""

    def __init__(self, table: Mapping[str, AOBaseConfig | None]) -> None:
        self.table = table
        self.patterns = [k for k in table if _is_pattern(k)]

    def _find(self, places: list[Place]) -> tuple[str, Place, bool] | None:
        own = [p for p in places if p.own]
        for p in places:
            if p.name in self.table:
                return p.name, p, True
        for p in own:
            if p.module_name in self.table:
                return p.module_name, p, False
        for key in self.patterns:
            for p in places:
                reached = _reaches(key, p)
                if reached:
                    return key, p, reached == "parameter"
        if EMBEDDINGS in self.table:
            table = next((p for p in own if _is_embedding(p.module)), None)
            if table is not None:
                return EMBEDDINGS, table, False
        if "_default" in self.table:
            return next((("_default", p, False) for p in own if is_linear(p.module)), None)
        return None

    def choose(self, places: list[Place]) -> Choice:
        found = self._find(places)
        if found is None:
            return Choice(None, places[0], why="no key matches it")
        key, place, named = found
        if self.table[key] is None:
            return Choice(None, place, key, named, f"skipped by {key!r}", "skipped")
        return Choice(self.table[key], place, key, named)

    def of_module(self, name: str, module: nn.Module) -> AOBaseConfig | None:
        if name in self.table:
            return self.table[name]
        if any(p is not None for p in module._parameters.values()):  # patterns do not match containers
            for key in self.patterns:
                if _matches(key, name):
                    return self.table[key]
        return self.table.get("_default") if isinstance(module, nn.Linear) else None

    def check_keys(self, places: list[Place], modules: list[str], handled: Collection[type]) -> None:
        for key, config in self.table.items():
            if key == EMBEDDINGS and not any(p.own and _is_embedding(p.module) for p in places):
                raise PlanError(f"{EMBEDDINGS}: the model has no embeddings; leave it out")
            if key in ("_default", EMBEDDINGS) or (type(config) in handled and any(_matches(key, m) for m in modules)):
                continue
            matched = [p for p in places if _matches(key, p.name) or _matches(key, p.module_name)]
            if any(_reaches(key, p) for p in matched) or (matched and config is None):
                continue
            for computed in filter(None, map(computed_from, places)):
                if _matches(key, computed.layer) or _matches(key, computed.name):
                    raise PlanError(f"{key!r}: {computed.name} is computed before each forward; {computed.remedy}")
            if not matched:
                raise PlanError(_nothing(key, places, modules))
            raise PlanError(f"{key!r} matches nothing that can be quantized: {_type(matched[0])} at {matched[0].name}")


# -- parameters to skip ----------------------------------------------------------------------------------------------


def skips(skip: Skip, places: list[Place]) -> Callable[[list[Place], Choice], str]:
    """(places of a parameter, its choice) -> why ``skip`` leaves it alone, or "".

    skip: names of modules or parameters, ends of such names ("lm_head"), globs; or such a function. A tied parameter is
    skipped if one of its names is. Raises PlanError for an entry that matches nothing.
    """
    if callable(skip):
        return skip
    check_skip("skip", skip)
    found: dict[str, str] = {}
    prefixes = {p.name: _prefixes(p.name) for p in places}
    for word in skip:
        hits = [name for name, around in prefixes.items() if any(_skipped_by(word, known) for known in around)]
        if not hits:
            known = {a for around in prefixes.values() for a in around}
            raise PlanError(f"skip={word!r} matches no module or parameter{_similar(word, known, 0.4)}")
        found |= {name: word for name in hits if name not in found}
    return lambda where, choice: next((f"skipped by {found[p.name]!r}" for p in where if p.name in found), "")


def _prefixes(name: str) -> list[str]:
    """For "a.b.weight": "a", "a.b", "a.b.weight"."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _skipped_by(word: str, name: str) -> bool:
    return name == word or name.endswith(f".{word}") or fnmatch.fnmatchcase(name, word)


# -- names and patterns ----------------------------------------------------------------------------------------------


def _nothing(key: str, places: list[Place], modules: list[str]) -> str:
    if key in modules:
        return f"{key!r} is a container without a weight of its own; use {key + '.*'!r} to match its layers"
    known = {p.name for p in places} | {p.module_name for p in places if p.module_name}
    respelled = _respelled(key, known)
    return f"{key!r} matches no module or parameter{hint(respelled) if respelled else _similar(key, known)}"


def _similar(word: str, known: Collection[str], cutoff: float = 0.5) -> str:
    """A suggestion of similar names; without one the first names, so that the reader sees what names look like."""
    names = sorted(known)
    listed = f"; the names are {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
    return did_you_mean(word, names, 3, cutoff) or listed


def _respelled(key: str, names: Collection[str]) -> list[str]:
    """A glob whose words that occur in no name are replaced by similar ones, if need be after any prefix:
    "*.down_prj" -> "*.down_proj", "self_atn.*" -> "*.self_attn.*"."""
    if key.startswith("re:") or not _is_pattern(key):
        return []
    words = {word for name in names for word in name.split(".")}
    close = {w: close_names(w, sorted(words), 1, 0.6) for w in key.split(".") if not _is_pattern(w)}
    fixed = ".".join(close[w][0] if w not in words and close.get(w) else w for w in key.split("."))
    tried = (fixed, f"*.{fixed}")  # a pattern must match a whole name
    return [k for k in tried if k != key and any(_matches(k, name) for name in names)][:1]


def _type(place: Place) -> str:
    return type(place.module).__name__


def _reaches(key: str, place: Place) -> str:
    """How a key selects this place: by the name of the "parameter", of the "module", or "" for not at all.

    A pattern selects a bare parameter only if it does not match its module too: ``*.experts.*`` selects the parameters
    of the experts, while ``layers.*`` selects layers, not a position embedding inside them.
    """
    if _matches(key, place.name):
        bare = kind_of(place.module) is None and not _matches(key, place.module_name)
        if place.own or key == place.name or bare:
            return "parameter"
    return "module" if place.own and _matches(key, place.module_name) else ""


def _is_pattern(key: str) -> bool:
    return key.startswith("re:") or any(c in key for c in "*?[")


@lru_cache(maxsize=1 << 16)
def _matches(key: str, name: str) -> bool:
    """Exact, glob, or ``re:`` over the whole name."""
    if key.startswith("re:"):
        try:
            return _compiled(key[3:])(name)
        except PlanError:
            raise
        except ValueError as error:
            raise PlanError(f"{key!r}: {error}") from error
    return key == name or (_is_pattern(key) and fnmatch.fnmatchcase(name, key))


@lru_cache(maxsize=1 << 10)
def _compiled(text: str) -> Callable[[str], bool]:
    """Match in time linear in the name if NamePattern supports the pattern (all patterns from files, see
    name_patterns), else with Python's ``re`` (patterns from code). Raises PlanError if neither supports it."""
    try:
        return NamePattern(text, whole=True).matches
    except ValueError:  # a pattern that files may not have
        pass
    try:
        found = re.compile(text)
    except re.error as error:
        raise PlanError(f"{'re:' + text!r} is not a regular expression: {error}") from error
    return lambda name: found.fullmatch(name) is not None
