"""``pennyweight doctor``: checks this installation; runs each kernel on a small weight, and with --bench times some."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..planning.configs.aliases import CONFIGS, by_name
from .output import Traceback, report_errors, table

if TYPE_CHECKING:
    import torch

    from ..core.tensor import AffineQuantizedTensor
    from ..kernels import Kernel

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
        lines += ["", *(str(Timing(**line)) for line in health.bench)]
    lines += ["", *(f"problem: {p}" for p in health.problems)] if health.problems else ["", "healthy"]
    return "\n".join(lines)


def _native_kernels() -> str:
    from ..kernels.cpu.library import REMEDY, available, isas, switched_off

    verdict = available()
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


# -- each kernel once against the reference ----------------------------------------------------------------------------

# Maximum distance of a kernel from the reference, as a ratio of norms: the error of its declared arithmetic with a
# margin for its sums, and for outputs rounded to bfloat16 (2**-9 per element).
_LIMITS = {"exact": 1e-6, "float32": 1e-4, "fixed22": 1e-4, "bfloat16": 2e-2}
_SHAPES = {
    "linear": (1024, 1024), "embedding": (64, 128), "bmm": (2, 64, 128), "convolution": (16, 8, 3, 3),
    "transposed_convolution": (64, 16, 4, 4),
}  # fmt: skip


@dataclass(frozen=True)
class CheckedKernel:
    """One row of the kernel table on this machine."""

    op: str
    name: str
    usable: bool
    note: str
    broken: bool = False  # it accepts a case and then fails or returns wrong values


def check_kernels(devices: set[str]) -> list[CheckedKernel]:
    """Run every kernel with the first config that it accepts, on one of the devices."""
    from ..kernels import kernels

    return [CheckedKernel(kernel.op, kernel.name, *_check(kernel, devices)) for kernel in kernels()]


def _check(kernel: Kernel, devices: set[str]) -> tuple[bool, str, bool]:
    """(usable, note, broken)."""
    import torch

    from ..kernels.table import case_of

    here = [d for d in kernel.devices or ("cpu",) if d in devices]
    if not here:
        return False, f"runs on {', '.join(kernel.devices or ())} only", False
    if kernel.op not in _SHAPES:
        return True, "not tested: doctor has no inputs for this op", False
    reasons: list[str] = []
    for name in CONFIGS:
        for dtype in (torch.float32, torch.bfloat16):
            try:
                weight = _weight(name, kernel.op, dtype, here[0])
                refused = kernel.refuses(case_of(weight, dtype), any_layout=True)
            except ValueError as error:  # a config may not fit an op at all
                refused = str(error)
            if refused is None:
                return _try(kernel, weight, f"with {name} weights and {str(dtype).removeprefix('torch.')} inputs")
            reasons.append(refused)
    return False, f"no config uses it: {'; '.join(dict.fromkeys(reasons))}", False


def _try(kernel: Kernel, weight: AffineQuantizedTensor, how: str) -> tuple[bool, str, bool]:
    import torch

    from ..kernels import get_kernel

    if kernel.rank < 0:
        return True, "the reference: dequantizes any weight at each call", False
    try:
        far = _distance(kernel, get_kernel(kernel.op, "dequantize"), weight)
    except Exception as error:  # a broken build may raise anything; doctor must report it
        return False, f"{type(error).__name__}: {error}", True
    limit = max(_LIMITS[kernel.tolerance], _LIMITS["bfloat16"] if weight.dtype is torch.bfloat16 else 0.0)
    if not far <= limit:  # also true for NaN
        return False, f"differs by {far:.1e} from the reference {how}; the limit is {limit:.0e}", True
    return True, f"{f'within {far:.0e} of' if far else 'equal to'} the reference {how}", False


def _weight(name: str, op: str, dtype: torch.dtype, device: str) -> AffineQuantizedTensor:
    import torch

    from ..algorithms.solvers.rtn import quantize_weight
    from ..planning.parameters import Site

    shape = _SHAPES[op]
    site = Site("weight", "", "weight", op, shape, dtype, device, "Linear")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return quantize_weight(values, by_name(name).scheme(site))[0]


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
    elif kernel.op == "transposed_convolution":
        x = torch.randn(2, 64, 5, 5, generator=random).to(weight.device, weight.dtype)
        rest = (None, [2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    else:
        x = torch.randn(*weight.shape[:-2], 5, weight.shape[-1], generator=random).to(weight.device, weight.dtype)
    with torch.no_grad():
        y, expected = kernel.run(x, packed, *rest).double(), reference.run(x, weight, *rest).double()
    return float((y - expected).norm() / expected.norm())


# -- --bench, quantized matrix products against float ------------------------------------------------------------------

SIZE = 1024
ROWS = (1, 128)
NAMES = ("int8-dynamic", "int8", "int4")
_ROUNDS = 9  # alternating, so that a busy moment affects both sides
_SECONDS = 0.005  # per sample: long relative to the clock's resolution
_NOISE = 2.0  # slowest over fastest sample of one side; near 1.1 on an idle machine


@dataclass(frozen=True)
class Timing:
    """One product [rows, 1024] @ [1024, 1024]: microseconds quantized and float, medians of alternating samples."""

    config: str
    dtype: str
    rows: int
    kernel: str
    microseconds: float
    float_microseconds: float
    noisy: bool  # the samples disagree: the machine was busy and the ratio is unreliable

    def __str__(self) -> str:
        ratio = self.float_microseconds / self.microseconds
        times = f"{max(ratio, 1 / ratio):.2f}"
        verdict = "same speed" if times == "1.00" else f"{times}x faster" if ratio > 1 else f"{times}x slower"
        verdict += ", but the machine is busy: measure again" if self.noisy else ""
        return (
            f"{self.config:<13}{self.rows:>4} row{'s' if self.rows > 1 else ' '} {self.dtype:<9}"
            f"{self.microseconds:>9.1f} us, float {self.float_microseconds:>9.1f} us: {verdict} ({self.kernel})"
        )


def measure() -> list[Timing]:
    """Time each config against a float product of the same dtype."""
    import torch
    from torch import nn

    from ..kernels import select
    from ..kernels.table import case_of
    from ..quantize import quantize_

    out = []
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype).requires_grad_(False)
        for name in NAMES:
            quantized = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)
            quantized.weight.data.copy_(layer.weight)
            quantize_(quantized, by_name(name))
            weight: Any = quantized.weight
            for rows in ROWS:
                x = torch.randn(rows, SIZE, dtype=dtype)
                with torch.no_grad():
                    ours, theirs, noisy = _alternate(partial(quantized, x), partial(layer, x))
                kernel = select("linear", case_of(weight, dtype)).name
                short = str(dtype).removeprefix("torch.")
                out.append(Timing(name, short, rows, kernel, ours * 1e6, theirs * 1e6, noisy))
    return out


def _alternate(a: Callable[[], Any], b: Callable[[], Any]) -> tuple[float, float, bool]:
    """Median seconds per call of each, and whether the samples of either disagree."""
    counts = [max(1, int(_SECONDS / max(_time(f, 3), 1e-9))) for f in (a, b)]
    samples = [(_time(a, counts[0]), _time(b, counts[1])) for _ in range(_ROUNDS)]
    ours, theirs = (sorted(side) for side in zip(*samples, strict=True))
    return median(ours), median(theirs), any(side[-1] > _NOISE * side[0] for side in (ours, theirs))


def _time(f: Callable[[], Any], count: int) -> float:
    f()
    start = perf_counter()
    for _ in range(count):
        f()
    return (perf_counter() - start) / count
