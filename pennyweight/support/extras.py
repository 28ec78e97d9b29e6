"""Optional packages, and the command that installs them.

Errors name the packages themselves: ``pennyweight[EXTRA]`` needs a release on PyPI, and there is none yet.
"""

from __future__ import annotations

# As in pyproject.toml; tests/packaging/test_extras.py compares them
EXTRAS = {
    "hf": ("transformers>=5.10.4,<5.24",),
    "hub": ("huggingface_hub",),
    "gguf": ("gguf",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "search": ("scipy",),
    "report": ("jinja2", "matplotlib"),
    "gpu": ("triton>=3.6",),
}


def install(extra: str) -> str:
    """The command that installs the packages of an extra. Requirements with a version are quoted for the shell."""
    return " ".join(["pip install", *(f"'{name}'" if set(name) & set("<>") else name for name in EXTRAS[extra])])
