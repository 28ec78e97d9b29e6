"""``pennyweight doctor``: checks this installation; runs each kernel on a small weight."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import Traceback, report_errors
from .printing import table

if TYPE_CHECKING:
    from .kernel_self_test import CheckedKernel

EXTRAS = ("transformers", "accelerate", "peft", "diffusers", "triton")
UNHEALTHY = 1


@dataclass
class Health:
    """The results of doctor; empty ``problems`` means healthy."""

    versions: dict[str, str]
    cpu: dict[str, Any]
    accelerators: list[str]
    native_kernels: str
    extras: dict[str, str | None]
    kernels: list[CheckedKernel]
    bench: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"version": 1, "healthy": not self.problems, **asdict(self)}


@report_errors
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    with_bench: Annotated[bool, typer.Option("--bench", help="Also time int8 and int4 against float here.")] = False,
    traceback: Traceback = False,
) -> None:
    """Check this installation.

    Prints versions and CPU features, and compares every kernel with the reference. Exit code 0 if healthy, else 1.
    """
    health = examine()
    if with_bench:
        from .bench import measure

        health.bench = [asdict(line) for line in measure()]
    typer.echo(json.dumps(health.to_dict(), indent=2) if as_json else text(health))
    if health.problems:
        raise typer.Exit(UNHEALTHY)


def examine() -> Health:
    """Run all checks, without timing."""
    import platform

    import torch

    from .. import __version__
    from ..kernels.torch_int8 import int_mm_saturates
    from .kernel_self_test import check_kernels

    versions = {"pennyweight": __version__, "torch": torch.__version__, "python": platform.python_version()}
    cpu = {
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "onednn": torch.backends.mkldnn.is_available(),
        "int_mm_saturates": int_mm_saturates(),
    }
    found = torch.accelerator.current_accelerator(check_available=True)
    accelerators = [] if found is None else [found.type]
    checked = check_kernels({"cpu", *accelerators})
    problems = [f"kernel {k.op}/{k.name}: {k.note}" for k in checked if k.broken]
    if not any(k.usable for k in checked):
        problems.append("no kernel is usable")
    return Health(versions, cpu, accelerators, _native_kernels(), _extras(), checked, problems=problems)


def text(health: Health) -> str:
    """The results as text."""
    cpu = health.cpu
    products = "saturates: int8 sums can be wrong" if cpu["int_mm_saturates"] else "is exact"
    facts = [
        *health.versions.items(),
        ("cpu", f"{cpu['machine']}, {cpu['capability']}, {cpu['threads']} threads"),
        ("oneDNN", "yes" if cpu["onednn"] else "no"),
        ("int8 products", f"torch._int_mm {products} here"),
        ("accelerator", ", ".join(health.accelerators) or "none"),
        ("native kernels", health.native_kernels),
        *((name, version or "not installed") for name, version in health.extras.items()),
    ]
    lines = [f"{name:<15} {value}" for name, value in facts]
    rows = [(k.op, k.name, "BROKEN" if k.broken else "usable" if k.usable else "no", k.note) for k in health.kernels]
    lines += ["", table(("op", "kernel", "here", ""), rows)]
    if health.bench:
        from .bench import Timing

        lines += ["", *(str(Timing(**line)) for line in health.bench)]
    lines += ["", *(f"problem: {p}" for p in health.problems)] if health.problems else ["", "healthy"]
    return "\n".join(lines)


def _native_kernels() -> str:
    from ..kernels.cpu.library import REMEDY, isas, missing, switched_off

    verdict = missing()
    if verdict is True:
        return ", ".join(isas())
    return f"none, torch's kernels run instead: {verdict}" + ("" if switched_off() else f". {REMEDY}")


def _extras() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    out: dict[str, str | None] = {}
    for name in EXTRAS:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = None
    return out
