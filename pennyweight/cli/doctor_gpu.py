"""``pennyweight doctor --device cuda``: whether the GPU kernels work here, and what runs each scheme. For reports."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .doctor_gpu_bench import SIZE, GpuTiming, products, quantized_weight, tune
from .output import table

if TYPE_CHECKING:
    import torch


# Short name of a config -> what it is on the page
SCHEMES = {
    "int4": "int4 weights", "int8": "int8 weights", "float8": "float8 weights",
    "float8-dynamic": "float8 weights and inputs", "int8-dynamic": "int8 weights and inputs",
}  # fmt: skip
_SMALL = 1024  # of those that choose a kernel


@dataclass
class GpuHealth:
    """What doctor found on a GPU; empty ``problems`` means healthy.

    families  family of kernels -> "passed 12 cases", or what failed
    schemes   scheme -> {"kernel": .., "note": why no better one runs}
    bench     rows of :class:`GpuTiming`
    tiles     the file that --tune wrote, or ""
    """

    device: str
    card: str = ""
    target: str = ""
    driver: str = ""
    memory: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)
    schemes: dict[str, dict[str, str]] = field(default_factory=dict)
    bench: list[dict[str, Any]] = field(default_factory=list)
    tiles: str = ""
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"version": 1, "healthy": not self.problems, **asdict(self)}

    def __str__(self) -> str:
        facts = [("device", self.device), ("card", self.card), ("target", self.target), ("driver", self.driver)]
        facts += [("memory", f"{self.memory / 2**30:.0f} GiB" if self.memory else ""), *self.versions.items()]
        lines = [f"{name:<12} {value}" for name, value in facts if value]
        if self.families:
            lines += ["", table(("kernels", "self-test"), self.families.items())]
        if self.schemes:
            rows = [(SCHEMES[name], found["kernel"], found["note"]) for name, found in self.schemes.items()]
            lines += ["", table(("scheme", "runs", ""), rows)]
        if self.bench:
            lines += ["", f"products [rows, {SIZE}] @ [{SIZE}, {SIZE}], beside bfloat16:"]
            columns = ("scheme", "rows", "us", "bf16 us", "times bf16", "spread", "runs")
            lines += [table(columns, [GpuTiming(**row).cells() for row in self.bench], right=columns[1:6])]
        lines += [f"tiles for this card: {self.tiles}"] if self.tiles else []
        end = [f"problem: {problem}" for problem in self.problems] or ["healthy"]
        return "\n".join([*lines, "", *end])


def examine_gpu(device: str, with_bench: bool = False, with_tune: bool = False) -> GpuHealth:
    """Everything that was asked for. A missing device is a problem; a text that names no device is a ValueError."""
    import torch

    from ..support.version import __version__

    if torch.device(_checked(device)).type != "cuda":
        raise ValueError(f"--device {device}: doctor checks the kernels of CUDA and ROCm devices; pass cuda or cuda:1")
    health = GpuHealth(device, versions={"pennyweight": __version__, "torch": torch.__version__})
    health.versions |= {"triton": _version("triton"), "python": platform.python_version()}
    missing = why_no_device(device)
    if missing:
        health.problems.append(missing)
        return health
    where = torch.device(device)
    _describe(health, where)
    with torch.cuda.device(where):
        _prove(health, where)
        _schemes(health, where)
        if with_bench:
            for name in SCHEMES:
                _bench(health, name, where)
        if with_tune:
            health.tiles = _tune(health, where)
    return health


def _checked(device: str) -> str:
    from ..core.model_arguments import check_device

    if device.partition(":")[0] in ("cuda", "gpu"):
        return device.replace("gpu", "cuda", 1)
    check_device("--device", device)
    return device


def why_no_device(device: str) -> str:
    """Why torch cannot use the device, with what to do; "" if it can."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"no device {device}: torch {torch.__version__} is a build for CPUs; install one for CUDA or ROCm from "
            "https://pytorch.org/get-started/locally"
        )
    if not torch.cuda.is_available():
        return f"no device {device}: torch {torch.__version__} finds no GPU; check the driver (nvidia-smi or rocm-smi)"
    count, index = torch.cuda.device_count(), torch.device(device).index or 0
    return "" if index < count else f"no device {device}: this machine has {count}, the last is cuda:{count - 1}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _describe(health: GpuHealth, device: torch.device) -> None:
    import torch

    from ..kernels.target import target_of

    card = torch.cuda.get_device_properties(device)
    health.card, health.memory, health.target = card.name, card.total_memory, target_of(device)
    health.driver = _driver()
    health.versions["cuda" if torch.version.hip is None else "hip"] = str(torch.version.cuda or torch.version.hip)


def _driver() -> str:
    """As nvidia-smi tells it; torch does not know it."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return f"unknown ({type(error).__name__})"


# -- whether the kernels work ------------------------------------------------------------------------------------------


def _prove(health: GpuHealth, device: torch.device) -> None:
    """The cases of the self-test, by family. A case that raises has failed."""
    try:
        from ..kernels.triton import self_test

        cases = self_test.cases(full=False)
    except ImportError as error:  # no Triton: torch's operators run
        health.families["triton"] = f"not usable, torch's operators run: {error}"
        return
    passed: dict[str, int] = {}
    failed: dict[str, list[str]] = {}
    for case in cases:
        family = case.name.partition(",")[0]
        try:
            why = self_test.run(case, device)
        except Exception as error:  # a compiler or a driver may raise anything; doctor must report it
            why = f"{type(error).__name__}: {error}"
        if why is None:
            passed[family] = passed.get(family, 0) + 1
        else:
            failed.setdefault(family, []).append(f"{case.name}: {why}")
    for family in dict.fromkeys([*passed, *failed]):
        bad = failed.get(family, [])
        good = f"passed {passed.get(family, 0)} cases"
        health.families[family] = f"FAILED {len(bad)}, {good}: {bad[0]}" if bad else good
        health.problems += [f"kernel {text}" for text in bad]


def _schemes(health: GpuHealth, device: torch.device) -> None:
    """The kernel of each scheme, and the sentence that refuses the next better one."""
    import torch

    from ..kernels import explain

    for name in SCHEMES:
        try:
            rows = explain(torch.bfloat16, quantized_weight(name, _SMALL, device)).rows
        except Exception as error:  # quantizing on a broken device may raise anything
            health.schemes[name] = {"kernel": "FAILED", "note": f"{type(error).__name__}: {error}"}
            health.problems.append(f"{name}: {type(error).__name__}: {error}")
            continue
        runs = next(i for i, row in enumerate(rows) if row[2] == "RUNS")
        refused = [f"{row[0]}: {row[2]}" for row in rows[:runs] if not row[2].startswith("runs on")]
        health.schemes[name] = {"kernel": rows[runs][0], "note": "; ".join(refused[:2])}


def _bench(health: GpuHealth, scheme: str, device: torch.device) -> None:
    kernel = health.schemes[scheme]["kernel"]
    try:
        health.bench += [asdict(line) for line in products(scheme, kernel, device)]
    except Exception as error:  # recorded; the other schemes go on
        health.problems.append(f"timing {scheme}: {type(error).__name__}: {error}")


def _tune(health: GpuHealth, device: torch.device) -> str:
    """Choose tiles and write the user's file. Returns its path, or "" with a problem."""
    if health.problems:
        health.problems.append("no tiles are chosen while something fails")
        return ""
    try:
        versions = f"pennyweight {health.versions['pennyweight']}, triton {health.versions['triton']}"
        return tune(health.card, health.target, f"doctor --tune, {versions}, driver {health.driver}", device)
    except Exception as error:  # a device may fail in the middle
        health.problems.append(f"choosing tiles: {type(error).__name__}: {error}")
        return ""
