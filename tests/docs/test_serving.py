"""docs/serving.md: its tables are those of the engine table and of the files that engines load."""

from tests.engines.tables import PAGE, page


def test_the_page_has_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run python -m tests.engines.tables"
