"""Name patterns against Python's re, on patterns that are ours; what is not read is refused; time stays linear."""

import re

import pytest

from pennyweight.io.codecs.patterns import MAX_PATTERN, Pattern

NAMES = [
    "", "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.12.self_attn.k_proj", "model.layers.3.mlp.gate",
    "model.layers.3.mlp.experts.17.down_proj", "model.layers.3.mlp.experts.17.down_proj.x", "vision_tower.0.fc1", "aab",
    "model.embed_tokens", "x3", "a.b", "a-b", "ab",
]  # fmt: skip
PATTERNS = [
    "", ".*", ".*q_proj", r".*\.(q|k|v)_proj$", r"^model\.layers\.\d+\.mlp", r"model.layers.[0-9]+.self_attn.*",
    r".*mlp\.experts\.\d+\.(gate|up|down)_proj$", "vision_tower.*", r".*mlp.gate$", "lm_head$", "a+b?$", r"(a|b)*$",
    r"[^.]+$", r"[a-z_]+\.\w+$", "(?:lm_head|x\\d)$", "a.b$", "a\\-b", "(ab|a)(b|bc)?$", "x|lm_head", ".*(attn|mlp).*",
    "[a-]", "((a)*)*b",
]  # fmt: skip


@pytest.mark.parametrize("text", PATTERNS)
def test_matches_are_those_of_re(text: str) -> None:
    got = [name for name in NAMES if Pattern(text).matches(name)]
    assert got == [name for name in NAMES if re.match(text, name)]


@pytest.mark.parametrize(
    "text",
    ["(", ")", "(?=a)", "(?P<n>a)", "a{3}", "a**", "a+?", "*", "[a", "[]", "\\", r"\1", r"\b", "a$b", "(a$)", "a$|b",
     "a^", "[z-a]", "x" * (MAX_PATTERN + 1), "(" * 30 + ")" * 30],
)  # fmt: skip
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        Pattern(text)


def test_a_pattern_that_stalls_backtracking_is_linear() -> None:
    assert not Pattern("(a*)*b").matches("a" * 5000)
    assert not Pattern("(a|a)*(a|aa)*(.*.*.*)*b$").matches("a" * 5000 + "c")
