"""``pennyweight doctor``: what this machine and this installation can do, each kernel tried on a small weight."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import Traceback, clearly
from .names import CONFIGS, build
from .tables import table

if TYPE_CHECKING:
    import torch

    from ..core.tensor import AffineQuantizedTensor
    from ..kernels import Kernel

EXTRAS = ("transformers", "accelerate", "peft", "diffusers", "triton")
UNHEALTHY = 1
# How far a kernel may be from the reference, as a ratio of norms: its declared arithmetic with room for its sums, and
# for outputs that are themselves rounded to bfloat16 (2**-9 an element).
_LIMITS = {"exact": 1e-6, "float32": 1e-4, "bfloat16": 2e-2}
_SHAPES = {"linear": (64, 128), "embedding": (64, 128), "bmm": (2, 64, 128), "convolution": (16, 8, 3, 3)}


@dataclass(frozen=True)
class Checked:
    """One row of the kernel table on this machine."""

    op: str
    name: str
    usable: bool
    note: str
    broken: bool = False  # it claims a case and then fails or gives other values


@dataclass
class Health:
    """Everything doctor found; ``problems`` empty means healthy."""

    versions: dict[str, str]
    cpu: dict[str, Any]
    accelerators: list[str]
    native_kernels: str
    extras: dict[str, str | None]
    kernels: list[Checked]
    bench: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"version": 1, "healthy": not self.problems, **asdict(self)}


@clearly
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    with_bench: Annotated[bool, typer.Option("--bench", help="Also time int8 and int4 against float here.")] = False,
    traceback: Traceback = False,
) -> None:
    """Check this installation.

    Versions, CPU, and every kernel tried against the reference. Exit code 0 healthy, 1 otherwise.
    """
    health = examine()
    if with_bench:
        from .bench import measure

        health.bench = [asdict(line) for line in measure()]
    typer.echo(json.dumps(health.to_dict(), indent=2) if as_json else text(health))
    if health.problems:
        raise typer.Exit(UNHEALTHY)


def examine() -> Health:
    """Look at everything; nothing is timed."""
    import platform

    import torch

    from .. import __version__

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
    """The findings, for people."""
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


def int_mm_saturates() -> bool:
    """Whether torch._int_mm gives wrong sums at the ends of int8, as on CPUs that add products in 16 bits."""
    import torch

    wrong = False
    for m in (1, 17, 32):
        for a, b in ((-128, -128), (127, 127), (-128, 127)):
            got = torch._int_mm(torch.full((m, 256), a, dtype=torch.int8), torch.full((256, 32), b, dtype=torch.int8))
            wrong |= not bool((got == 256 * a * b).all())
    return wrong


def check_kernels(devices: set[str]) -> list[Checked]:
    """Run every row of the table on a small weight of the first config that it accepts, beside the reference."""
    from ..kernels import kernels

    return [_check(kernel, devices) for kernel in kernels()]


def _check(kernel: Kernel, devices: set[str]) -> Checked:
    import torch

    from ..kernels import get_kernel
    from ..kernels.table import case_of

    here = [d for d in kernel.devices or ("cpu",) if d in devices]
    if not here:
        return Checked(kernel.op, kernel.name, False, f"runs on {', '.join(kernel.devices or ())} only")
    if kernel.op not in _SHAPES:
        return Checked(kernel.op, kernel.name, True, "not tried: doctor knows no inputs for this op")
    reason = "no short config name leads to it"
    for name in CONFIGS:
        for dtype in (torch.float32, torch.bfloat16):
            try:
                weight = _weight(name, kernel.op, dtype, here[0])
            except ValueError as error:  # a config may not fit an op at all, such as groups of a convolution
                reason = str(error)
                continue
            refused = kernel.refuses(case_of(weight, dtype), any_layout=True)
            if refused is not None:
                reason = refused
                continue
            if kernel.rank < 0:
                return Checked(kernel.op, kernel.name, True, "the reference: any weight, dequantized at each call")
            try:
                far = _distance(kernel, get_kernel(kernel.op, "dequantize"), weight)
            except Exception as error:  # a broken build may raise anything, and saying so is this command's purpose
                return Checked(kernel.op, kernel.name, False, f"{type(error).__name__}: {error}", broken=True)
            limit = max(_LIMITS[kernel.tolerance], _LIMITS["bfloat16"] if dtype is torch.bfloat16 else 0.0)
            with_ = f"with {name} weights and {str(dtype).removeprefix('torch.')} inputs"
            if not far <= limit:
                note = f"off by {far:.1e} from the reference {with_}; at most {limit:.0e} is due"
                return Checked(kernel.op, kernel.name, False, note, broken=True)
            return Checked(kernel.op, kernel.name, True, f"within {far:.0e} of the reference {with_}")
    return Checked(kernel.op, kernel.name, False, reason)


def _weight(name: str, op: str, dtype: torch.dtype, device: str) -> AffineQuantizedTensor:
    import torch

    from ..models.quantize import quantize_weight
    from ..models.sites import Site

    shape = _SHAPES[op]
    config = build(name)
    site = Site("weight", "", "weight", op, shape, dtype, device, "Linear")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return quantize_weight(values, config.scheme(site))[0]


def _distance(kernel: Kernel, reference: Kernel, weight: AffineQuantizedTensor) -> float:
    """|y - y_reference| / |y_reference|."""
    import torch

    random = torch.Generator().manual_seed(1)
    packed = weight if kernel.layout is None else weight.to_layout(kernel.layout)
    rest: tuple[Any, ...] = (None,)
    if kernel.op == "embedding":
        x = torch.arange(0, 64, 7, device=weight.device)
    elif kernel.op == "convolution":
        x = torch.randn(2, 8, 9, 9, generator=random).to(weight.device, weight.dtype)
        rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    else:
        x = torch.randn(*weight.shape[:-2], 5, 128, generator=random).to(weight.device, weight.dtype)
    with torch.no_grad():
        y, expected = kernel.run(x, packed, *rest).double(), reference.run(x, weight, *rest).double()
    return float((y - expected).norm() / expected.norm())


def _native_kernels() -> str:
    from importlib.util import find_spec

    return "none built (pure torch)" if find_spec("pennyweight.kernels.cpu") is None else "pennyweight.kernels.cpu"


def _extras() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    out: dict[str, str | None] = {}
    for name in EXTRAS:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = None
    return out
