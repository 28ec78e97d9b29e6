"""Writes the index in examples/README.md: one line for each script, its docstring's first line.

python -m tests.examples.index
"""

import ast
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
README = EXAMPLES / "README.md"
START, END = "<!-- index -->\n", "<!-- end of index -->\n"
# by task, in the order of a model's life; demo.py has a line of its own below the index
ORDER = (
    "llm_int4", "embedder", "image_classifier", "speech_encoder", "moe", "lora_4bit", "qat", "float8_training",
    "low_bit_optimizer", "serve_vllm", "gguf_round_trip", "onnx_export",
)  # fmt: skip


def first_line(script: Path) -> str:
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def index() -> str:
    return "".join(f"- [`{name}.py`]({name}.py): {first_line(EXAMPLES / f'{name}.py')}\n" for name in ORDER)


def split() -> tuple[str, str, str]:
    """README's text before the index, the index, and the text after it."""
    before, _, rest = README.read_text(encoding="utf-8").partition(START)
    found, _, after = rest.partition(END)
    return before, found, after


if __name__ == "__main__":
    before, _, after = split()
    README.write_text(before + START + index() + END + after, encoding="utf-8")
