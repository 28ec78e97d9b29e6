"""The tables of docs/serving.md: what each engine does with each kind of weight, and with each file.

``python -m tests.engines.tables`` writes them into the page.
"""

from pathlib import Path

from pennyweight.planning.engines import ENGINES, ROWS, Reads
from tests.engines.cases import CASES, HIGH, LOW, VLLM

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def schemes() -> str:
    """A row for each kind of weight (planning/engines.py), a column for each engine, and the reasons."""
    reasons: list[str] = []

    def note(text: str) -> str:
        if text not in reasons:
            reasons.append(text)
        return f"[{reasons.index(text) + 1}]"

    out = f"| weights | such as | {' | '.join(e.title for e in ENGINES.values())} |\n|---|---|{'---|' * len(ENGINES)}\n"
    for row in ROWS:
        cells = []
        for engine in ENGINES:
            found = row.engines[engine]
            if isinstance(found, Reads):
                cells.append("yes" + (f" {note(found.note)}" if found.note else ""))
            else:
                cells.append(f"no {note(found.why)}, `{found.nearest}`")
        out += f"| {row.text} | `{row.example}` | {' | '.join(cells)} |\n"
    return out + "\n" + "".join(f"{i}. {reason}\n" for i, reason in enumerate(reasons, 1))


def files() -> str:
    """A row for each file of cases.py, a column for each engine that it was loaded into."""
    engines = {VLLM: "vLLM 0.32.0 on a CPU", LOW: LOW, HIGH: HIGH}
    out = f"| file | {' | '.join(engines.values())} |\n|---|{'---|' * len(engines)}\n"
    for case in CASES.values():
        said = {engine: case.refused.get(engine) for engine in engines}
        cells = ["reads" if text is None else f"refuses: `{text}`" for text in said.values()]
        name = case.text if case.text.startswith(("GPTQ", "AWQ")) else f"{case.to}: {case.text}"
        out += f"| {name} | {' | '.join(cells)} |\n"
    return out


def page(text: str) -> str:
    """The page with its tables replaced, each between two marks."""
    for name, table in (("schemes", schemes()), ("files", files())):
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"docs/serving.md has no marks {begin.strip()} and {end.strip()}")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
