"""docs/serving.md: its tables are those of the engine table and of the files that engines load."""

from pathlib import Path

import pytest

from tests.engines import tables

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.mark.parametrize("name", ["schemes", "files"])
def test_the_page_has_the_tables(name: str) -> None:
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(begin) == text.count(end) == 1
    shown = text.partition(begin)[2].partition(end)[0]
    assert shown.strip() == getattr(tables, name)().strip(), (
        f"replace it by the text of tests/engines/tables.py {name}()"
    )
