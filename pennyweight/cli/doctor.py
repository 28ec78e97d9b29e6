"""``pennyweight doctor``: checks this installation; runs each kernel on a small weight, and with --bench times some."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from ..planning.config_names import CONFIGS
from .doctor_bench import Timing, fused_encoder, measure
from .options import Bench, Gpu, Json, Traceback, Tune
from .output import check_report_path, report_errors, show, table

if TYPE_CHECKING:
    import torch

    from ..core.tensor import AffineQuantizedTensor
    from ..kernels import Kernel

EXTRAS = ("transformers", "accelerate", "peft", "diffusers", "triton")
UNHEALTHY = 1
EPILOG = """Examples:
  pennyweight doctor
  pennyweight doctor --bench --json doctor.json
  pennyweight doctor --device cuda --bench"""


@dataclass
class Health:
    """The results of doctor; empty ``problems`` means healthy."""

    versions: dict[str, str]
    cpu: dict[str, Any]
    accelerators: list[str]
    native_kernels: str
    fused_blocks: str
    extras: dict[str, str | None]
    kernels: list[CheckedKernel]
    bench: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"version": 1, "healthy": not self.problems, **asdict(self)}


@report_errors
def doctor(
    with_bench: Bench = False,
    device: Gpu = "",
    with_tune: Tune = False,
    json_path: Json = "",
    traceback: Traceback = False,
) -> None:
    """Check this installation.

    Prints versions and CPU features, and compares every kernel with the reference. Exit code 0 if healthy, else 1.
    With --device the same of a GPU, as a table for a report.
    """
    check_report_path(json_path, None)
    if with_tune and not device:
        raise ValueError("--tune chooses tiles for a GPU: pass --device cuda")
    if device:
        from .doctor_gpu import examine_gpu

        gpu = examine_gpu(device, with_bench, with_tune)
        show(gpu.to_dict(), lambda: str(gpu), json_path)
        if gpu.problems:
            raise typer.Exit(UNHEALTHY)
        return
    health = examine()
    if with_bench:
        health.bench = [asdict(line) for line in measure()]
    show(health.to_dict(), lambda: text(health), json_path)
    if health.problems:
        raise typer.Exit(UNHEALTHY)


def examine() -> Health:
    """Run all checks, without timing."""
    import platform

    import torch

    from ..kernels.target import target_of
    from ..kernels.torch_int8 import int_mm_saturates
    from ..support.version import __version__

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
    checked = check_kernels({"cpu", *map(target_of, accelerators)})
    problems = [f"kernel {k.op}/{k.name}: {k.note}" for k in checked if k.broken]
    if not any(k.usable for k in checked):
        problems.append("no kernel is usable")
    blocks, broken = check_blocks()
    if broken:
        problems.append(f"fused blocks: {blocks}")
    return Health(versions, cpu, accelerators, _native_kernels(), blocks, _extras(), checked, problems=problems)


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
        ("fused blocks", health.fused_blocks),
        *((name, version or "not installed") for name, version in health.extras.items()),
    ]
    lines = [f"{name:<15} {value}" for name, value in facts]
    rows = [(k.op, k.name, "BROKEN" if k.broken else "usable" if k.usable else "no", k.note) for k in health.kernels]
    lines += ["", table(("op", "kernel", "here", ""), rows)]
    heading = ""
    for line in health.bench:
        timing = Timing(**line)
        lines += ["", f"{timing.what}:"] if timing.what != heading else []
        lines.append(str(timing))
        heading = timing.what
    lines += ["", *(f"problem: {p}" for p in health.problems)] if health.problems else ["", "healthy"]
    return "\n".join(lines)


def _native_kernels() -> str:
    from ..kernels.cpu.library import REMEDY, available, isas, switched_off

    verdict = available()
    if verdict is True:
        return ", ".join(isas())
    return f"none, torch's kernels run instead: {verdict}" + ("" if switched_off() else f". {REMEDY}")


def check_blocks() -> tuple[str, bool]:
    """(Whether a small transformer block runs as one native call here, whether it should but does not)."""
    from ..kernels.cpu.library import available

    verdict = available()
    if verdict is not True:
        return f"no, blocks run layer by layer: {verdict}", False
    try:
        reason = fused_encoder(64, "int8")[1]
    except Exception as error:  # a broken build may raise anything; doctor must report it
        reason = f"{type(error).__name__}: {error}"
    return (f"BROKEN, {reason}", True) if reason else ("yes, within tolerance of their own forward", False)


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


def check_kernels(targets: set[str]) -> list[CheckedKernel]:
    """Run every kernel with the first config that it accepts, on one of the targets of this machine."""
    from ..kernels import kernels

    return [CheckedKernel(kernel.op, kernel.name, *_check(kernel, targets)) for kernel in kernels()]


def _check(kernel: Kernel, targets: set[str]) -> tuple[bool, str, bool]:
    """(usable, note, broken)."""
    import torch

    from ..kernels.table import case_of
    from ..kernels.target import device_type, fits

    here = [device_type(t) for t in sorted(targets) if fits(kernel.devices or ("cpu",), t)]
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
    from ..planning.configs.by_name import by_name
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
