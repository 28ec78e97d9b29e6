"""Tables as text: no line is wider than the terminal, and what is left out is said."""

import pytest

from pennyweight.support.tables import text_table

COLUMNS = ("parameter", "shape", "scheme", "kernel", "before", "after", "SQNR dB", "note")
ROWS = [
    ["model.layers.*.self_attn.q_proj.weight (16)", "256×256", "int4, groups of 128", "cpu_int", "4.19 MB", "590 kB",
     "19.9 to 20.1", ""],
    ["model.layers.*.mlp.down_proj.weight (16)", "256×512", "int4, groups of 128", "cpu_int", "8.39 MB", "1.18 MB",
     "20.0 to 20.1", ""],
    ["model.embed_tokens.weight", "", "left alone", "", "131 kB", "131 kB", "", "Embedding: not selected by default"],
]  # fmt: skip


def drawn(width: int, monkeypatch: pytest.MonkeyPatch, rows: list[list[str]] = ROWS, whole: bool = False) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    return text_table(
        COLUMNS, rows, right=("shape",), title="[title]", caption="below", drop=("kernel", "shape"), whole=whole
    )


@pytest.mark.parametrize("width", [40, 80, 90, 100, 120, 150, 300])
def test_no_line_is_wider_than_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(width, monkeypatch)
    lines = text.split("\n")
    assert max(map(len, lines)) <= max(width, 80)
    assert all(line == line.rstrip() for line in lines)
    assert lines[0] == "[title]"
    for end in ("q_proj.weight (16)", "down_proj.weight (16)", "4.19 MB", "19.9 to 20.1", "not selected"):
        assert end in text, text  # in one line, however narrow
    heads = {word for line in lines[:5] for word in line.strip("┃").split()}
    for name in ("kernel", "shape"):
        left_out = any(line.startswith("not shown in") and name in line for line in lines)
        assert (name in heads) != left_out
    assert ("cpu_int" in text) == ("kernel" in heads)


def test_an_empty_column_takes_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "note" not in drawn(150, monkeypatch, ROWS[:2])
    assert "model.layers.*.self_attn.q_proj.weight (16)" in drawn(150, monkeypatch, ROWS[:2])
    assert "note" in drawn(150, monkeypatch)
    assert "parameter" in drawn(150, monkeypatch, [])


def test_whole_texts_are_folded_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(80, monkeypatch, whole=True)
    assert "…" not in text
    assert "not shown" not in text
    assert max(map(len, text.split("\n"))) <= 80
