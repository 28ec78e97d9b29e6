"""docs/torchao.md lists what is served now."""

from tests.compat.torchao import names_table


def test_the_page_is_current() -> None:
    assert names_table.DOC.read_text(encoding="utf-8") == names_table.page(), (
        "run python -m tests.compat.torchao.names_table"
    )
