"""docs/torchao.md lists what is served now."""

from adapters.torchao.tests import names_table


def test_the_page_is_current() -> None:
    assert names_table.DOC.read_text(encoding="utf-8") == names_table.page(), (
        "run python -m adapters.torchao.tests.names_table"
    )
