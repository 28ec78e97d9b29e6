"""Name patterns against Python's re, on patterns that are ours; what is not read is refused; time stays linear."""

import random
import re
import time

import pytest
import torch

import pennyweight as pw
from pennyweight.io.config_files import quantization_config
from pennyweight.planning.config_resolution import PlanError
from pennyweight.planning.configs.serialize import config_from_data, config_to_data
from pennyweight.planning.name_patterns import MAX_PATTERN, MAX_PATTERNS, NamePattern

NAMES = [
    "", "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.12.self_attn.k_proj", "model.layers.3.mlp.gate",
    "model.layers.3.mlp.experts.17.down_proj", "model.layers.3.mlp.experts.17.down_proj.x", "vision_tower.0.fc1", "aab",
    "model.embed_tokens", "x3", "a.b", "a-b", "ab",
]  # fmt: skip
PATTERNS = [
    "", ".*", ".*q_proj", r".*\.(q|k|v)_proj$", r"^model\.layers\.\d+\.mlp", r"model.layers.[0-9]+.self_attn.*",
    r".*mlp\.experts\.\d+\.(gate|up|down)_proj$", "vision_tower.*", r".*mlp.gate$", "lm_head$", "a+b?$", r"(a|b)*$",
    r"[^.]+$", r"[a-z_]+\.\w+$", "(?:lm_head|x\\d)$", "a.b$", "a\\-b", "(ab|a)(b|bc)?$", "x|lm_head", ".*(attn|mlp).*",
    "[a-]", "((a)*)*b", "a+?b", ".*?attn.*?", r"model\.layers\.\d{1,2}\..*", "(a|b){2}", "a{2,}b",
    "a{0,1}b??", "a{0}b?", "[^.]{2,6}$", r"(model|vision_tower)(\.[a-z_0-9]{1,9}?){2,3}",
]  # fmt: skip


@pytest.mark.parametrize("text", PATTERNS)
def test_matches_are_those_of_re(text: str) -> None:
    got = [name for name in NAMES if NamePattern(text).matches(name)]
    assert got == [name for name in NAMES if re.match(text, name)]


@pytest.mark.parametrize(
    "text",
    ["(", ")", "(?=a)", "(?P<n>a)", "a{65}", "a{2,1}", "a{,2}", "a{", "a{x}", "((a{60}){60}){9}",
     "a**", "a*+", "a{2}+", "*", "[a", "[]", "\\", r"\1", r"\b", "a$b", "(a$)", "a$|b",
     "a^", "[z-a]", "x" * (MAX_PATTERN + 1), "(" * 30 + ")" * 30],
)  # fmt: skip
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        NamePattern(text)


@pytest.mark.parametrize("text", [p for p in PATTERNS if not p.endswith("$")])
def test_whole_names(text: str) -> None:
    got = [name for name in NAMES if NamePattern(text, whole=True).matches(name)]
    assert got == [name for name in NAMES if re.fullmatch(text, name)]


def test_a_pattern_that_stalls_backtracking_is_linear() -> None:
    assert not NamePattern("(a*)*b").matches("a" * 5000)
    assert not NamePattern("(a|a)*(a|aa)*(.*.*.*)*b$").matches("a" * 5000 + "c")


STALLS = ["(a+)+$", "(a|a)*b", "(.*)*x", ".*.*.*.*.*.*.*.*x", "(a?){30}a{30}", "(a|aa)+$"]


@pytest.mark.parametrize("text", STALLS)
def test_configs_out_of_files_cannot_stall(text: str) -> None:
    """Each would keep ``re.fullmatch`` busy for ages on this name."""
    key = f"re:{text}"
    config = pw.FqnToConfig({key: pw.Int8WeightOnlyConfig(), "_default": None})
    model = torch.nn.ModuleDict({"a" * 60 + "c": torch.nn.Linear(8, 8), "aab": torch.nn.Linear(8, 8)})
    meant = re.fullmatch(text, "aab") is not None
    for read in [config_from_data(config_to_data(config))]:
        assert read == config
        began = time.perf_counter()
        if meant:
            assert [r.name for r in pw.quantize_(model, read, dry_run=True).quantized] == ["aab.weight"]
        else:
            with pytest.raises(PlanError, match="matches no module"):
                pw.quantize_(model, read, dry_run=True)
        assert time.perf_counter() - began < 20  # milliseconds; without it, years


@pytest.mark.parametrize("text", ["(?!lm_head).*", r"(a+)\1", "(?P<x>a)(?P=x)", "(?<=a)b"])
def test_more_is_for_code_alone(text: str) -> None:
    config = pw.FqnToConfig({f"re:{text}": pw.Int8WeightOnlyConfig()})
    model = torch.nn.ModuleDict({"aa": torch.nn.Linear(8, 8)})
    if re.fullmatch(text, "aa"):
        assert pw.quantize_(model, config).quantized
    data = {"type": "FqnToConfig", "fqn_to_config": [[f"re:{text}", {"type": "Int8WeightOnlyConfig"}]]}
    with pytest.raises(ValueError, match="files may contain simple patterns only"):
        config_from_data(data)
    with pytest.raises(ValueError, match="simple patterns only"):  # and nothing is written that would not be read
        config_to_data(config)
    assert quantization_config(config)["config"] is None


def test_many_patterns_and_hostile_ones() -> None:
    pairs = [[f"re:a{i}", None] for i in range(MAX_PATTERNS + 1)]
    with pytest.raises(ValueError, match=f"{MAX_PATTERNS + 1} patterns; a file may contain at most {MAX_PATTERNS}"):
        config_from_data({"type": "FqnToConfig", "fqn_to_config": pairs})
    # its sets of states are 2^60: each sign leads to one that was never seen
    hostile = NamePattern("(a|b)*a(a|b){60}c", whole=True)
    random.seed(0)
    names = ["".join(random.choices("ab", k=900)) for _ in range(1000)]
    with pytest.raises(ValueError, match="takes too long"):
        list(map(hostile.matches, names))
