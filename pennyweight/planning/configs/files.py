"""Configs in files: YAML or JSON, with the content of :meth:`FqnToConfig.to_json` or a mapping of names to configs.

    "*.mlp.*": int4:64
    "*.k_proj": null
    lm_head: {type: Int8WeightOnlyConfig}
    _embeddings: int8
    _default: w4a16

A file with the key ``type`` is a config as :mod:`.serialize` writes it; one with the key ``config`` holds such a config
there (a result of ``search``). Any other file maps name patterns to configs, as :class:`.fqn.FqnToConfig` does: short
names with an optional group size, ``null``, or a config with its ``type``. Files are data: YAML is read with the safe
loader, and patterns must be matchable in linear time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from ...support.arguments import close_names, did_you_mean, hint
from .base import AOBaseConfig
from .by_name import CONFIGS, by_name, named
from .fqn import FqnToConfig
from .serialize import config_from_data, config_to_data

ENDINGS = (".yaml", ".yml", ".json")
_MAX_BYTES = 64 << 20  # results of search list all options of each weight


def is_config_file(text: str) -> bool:
    """Whether a config given as text is the path of a file, not a short name."""
    return text.endswith(ENDINGS)


def read_config(path: str | os.PathLike[str]) -> AOBaseConfig:
    """The config of a file. Raises ValueError with the file and the line for invalid content, OSError."""
    path = os.fspath(path)
    if not os.path.isfile(path):
        folder = os.path.dirname(path)
        near = [n for n in os.listdir(folder or ".") if is_config_file(n)] if os.path.isdir(folder or ".") else []
        close = [os.path.join(folder, name) for name in close_names(os.path.basename(path), near, 1, 0.6)]
        raise FileNotFoundError(f"config {path!r}: there is no such file{hint(close)}; a config file is YAML or JSON")
    if os.path.getsize(path) > _MAX_BYTES:
        raise ValueError(f"{path} has {os.path.getsize(path):,} bytes; a config has at most {_MAX_BYTES:,}")
    with open(path, encoding="utf-8") as file:
        try:
            text = file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text file in UTF-8 ({error})") from error
    data = _from_json(path, text) if path.endswith(".json") else _from_yaml(path, text)
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{path}: line 1: expected names with their configs, such as '_default: int4'")
    try:
        if "type" in data:
            return config_from_data(data)
        if isinstance(data.get("config"), dict) and "type" in data["config"]:
            return config_from_data(data["config"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}{_line_of(text, str(error))}") from error
    table: dict[str, AOBaseConfig | None] = {}
    for key, value in data.items():
        try:
            table[_key(key)] = _value(value)
        except ValueError as error:
            raise ValueError(f"{path}: line {_line(text, str(key))}: {key}: {error}") from error
    try:
        config = FqnToConfig(table)
        config_to_data(config)  # patterns must be matchable in linear time
        return config
    except ValueError as error:
        raise ValueError(f"{path}: {error}{_line_of(text, str(error))}") from error


def write_config(config: AOBaseConfig, path: str | os.PathLike[str]) -> None:
    """Write a config to a file that :func:`read_config` reads: YAML with a line per name, or JSON (``to_json``).

    Raises ValueError for a config of another library or another ending of the name, OSError.
    """
    path = os.fspath(path)
    if not is_config_file(path):
        raise ValueError(f"{path}: the name of a config file must end in {', '.join(ENDINGS)}")
    data = config_to_data(config)
    if path.endswith(".json"):
        text = json.dumps(data, indent=2) + "\n"
    elif isinstance(config, FqnToConfig):
        text = "".join(f"{json.dumps(key)}: {_flow(value)}\n" for key, value in config.fqn_to_config.items())
    else:
        text = json.dumps(data) + "\n"  # JSON is YAML
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def layer_config(
    layers: Sequence[str] = (), embeddings: str | None = None, rest: AOBaseConfig | None = None
) -> AOBaseConfig:
    """The config of a command line: ``PATTERN=CONFIG`` of single layers, the config of the embeddings, and that of all
    other linear layers, which may itself map names. Raises ValueError.

    A pattern is one of FqnToConfig; a config is a short name, with a group size if wanted ("int4:64"), or "none".
    """
    table: dict[str, AOBaseConfig | None] = {}
    for text in layers:
        pattern, equals, name = text.rpartition("=")
        if not (equals and pattern and name):
            raise ValueError(f"--layer {text}: expected PATTERN=CONFIG, such as '*.down_proj=int8' or lm_head=none")
        if pattern in table:
            raise ValueError(f"--layer {text}: {pattern} was given twice")
        table[pattern] = _of_option(f"--layer {text}", name)
    if embeddings is not None:
        table["_embeddings"] = _of_option(f"--embeddings {embeddings}", embeddings)
    if not table:
        if rest is None:
            raise ValueError("a config is required")
        return rest
    if isinstance(rest, FqnToConfig):  # the options come first, because the first match wins
        return FqnToConfig(table | {key: value for key, value in rest.fqn_to_config.items() if key not in table})
    return FqnToConfig(table if rest is None else {**table, "_default": rest})


def _of_option(option: str, name: str) -> AOBaseConfig | None:
    try:
        config: AOBaseConfig | None = None if name == "none" else named(name)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    return config


def _key(key: Any) -> str:
    if not isinstance(key, str) or not key:
        raise ValueError(f"a name must be a string, got {key!r}; quote it")
    if key.startswith("_") and key not in ("_default", "_embeddings"):
        raise ValueError(f"unknown key{did_you_mean(key, ['_default', '_embeddings'])}")
    return key


def _value(value: Any) -> AOBaseConfig | None:
    if value is None or isinstance(value, str):
        return None if value in (None, "none") else named(value)
    if isinstance(value, dict) and "type" in value:
        return config_from_data(value)
    raise ValueError(f"expected a config such as int4, int4:64 or null, got {str(value)[:80]}")


def _flow(config: AOBaseConfig | None) -> str:
    """A config in YAML: its short name, with a group size if needed; else its plain data as JSON."""
    if config is None:
        return "null"
    for name, entry in CONFIGS.items():
        if entry.algorithm:
            continue
        if by_name(name) == config:
            return name
        size = getattr(config, "group_size", getattr(getattr(config, "granularity", None), "group_size", None))
        if entry.group and type(size) is int and by_name(name, size) == config:
            return f"{name}:{size}"
    return json.dumps(config_to_data(config))


# -- text with lines ---------------------------------------------------------------------------------------------------


def _from_json(path: str, text: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            twice = next(key for i, (key, _) in enumerate(items) if key in dict(items[:i]))
            raise ValueError(f"{path}: line {_line(text, twice, last=True)}: {twice!r} was given twice")
        return out

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno} is not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deep") from error


def _yaml(path: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"{path}: YAML needs PyYAML; pip install pyyaml, or use a .json file") from error
    return yaml


def _from_yaml(path: str, text: str) -> Any:
    yaml = _yaml(path)
    base: Any = yaml.SafeLoader

    class Loader(base):
        """Refuses what a config does not need: duplicate keys, of which the last would win, and aliases."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key, _ in node.value:
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
                if name in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} was given twice", key.start_mark
                    )
                seen.add(name)
            out: dict[Any, Any] = super().construct_mapping(node, deep)
            return out

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                raise yaml.composer.ComposerError(
                    None, None, "aliases are not supported; write a name that begins with * in quotes", event.start_mark
                )
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}: "
        hint = ""
        if mark is not None and mark.line < len(text.splitlines()):
            here = text.splitlines()[mark.line].lstrip()
            hint = "; write a name that begins with * in quotes" if here.startswith("*") else ""
        problem = str(error.problem)
        raise ValueError(f"{path}: {where}{problem}{'' if 'in quotes' in problem else hint}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deep") from error


def _line(text: str, word: str, last: bool = False) -> int:
    """The number of the first line (``last``: the last) that contains a word; 1 if none does."""
    lines = [i for i, line in enumerate(text.splitlines(), 1) if word in line]
    return lines[-1 if last else 0] if lines else 1


def _line_of(text: str, message: str) -> str:
    """ " (line 3)": where the most specific quoted word of a message stands; "" if it quotes none of the file."""
    words = [w for w in message.split("'")[1::2] if w and w in text]
    return f" (line {_line(text, words[-1])})" if words else ""
