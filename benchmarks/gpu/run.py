"""The command line of ``scripts/gpu``, and the parent process: it never touches the device.

Stages run in a worker. The parent ends a worker whose case hangs, and starts another one after a crash: a kernel that
writes out of bounds takes its CUDA context with it, and must not take the later stages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .results import FILE, KERNELS, ROOT, VERSION, Results, commit_of, digest, environment, read_current
from .stages import CRASHED, NAMES, SECONDS, SHARES

_RESTARTS = 8
_START_SECONDS = 120.0  # a worker imports torch, on a new machine from a cold disk, and starts CUDA
_GRACE = 6.0  # seconds for the report at the end


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    os.environ.setdefault("PENNYWEIGHT_NATIVE", "0")  # the native library is not built there, and not asked for
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".tricache"))
    if args.prepare:
        from .prepare import prepare

        return prepare(args.target, args.jobs, Path(args.out) if args.out else None, args.budget)
    if args.collect:
        from .collect import collect

        return collect(Path(args.collect))
    if not args.out:
        raise SystemExit("scripts/gpu: --out FOLDER is required")
    only = tuple(name for name in args.only.split(",") if name) or NAMES
    unknown = [name for name in only if name not in NAMES]
    if unknown:
        raise SystemExit(f"scripts/gpu: no stage {', '.join(unknown)}; known: {', '.join(NAMES)}")
    return run(Path(args.out), args, [name for name in NAMES if name in only])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__)
    parser.add_argument("--out", default="", help="folder of the results; it is made")
    parser.add_argument("--budget", type=float, default=SECONDS, help="seconds in all")
    parser.add_argument("--only", default="", help=f"stages, separated by commas: {','.join(NAMES)}")
    parser.add_argument("--dry", action="store_true", help="no device: invented times, small sizes")
    parser.add_argument("--prepare", action="store_true", help="compile ahead, without a device")
    parser.add_argument("--target", default="cuda:sm_90", help="for --prepare")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile; default: all processors but two")
    parser.add_argument("--collect", default="", metavar="FOLDER", help="check in the results of a run")
    parser.add_argument("--commit", default="", help="where the tree travels without .git")
    return parser


def run(out: Path, args: argparse.Namespace, names: list[str]) -> int:
    """All stages. Returns 0 if all ran and nothing failed."""
    begin = time.time()
    end = begin + args.budget - min(_GRACE, 0.05 * args.budget)
    out.mkdir(parents=True, exist_ok=True)
    (out / FILE).unlink(missing_ok=True)
    results = Results(
        out,
        {
            "version": VERSION, "dry": args.dry, "commit": args.commit or commit_of(),
            "digest": {"pennyweight": digest(), "kernels": digest(KERNELS), "benchmarks": digest("benchmarks/gpu")},
            "started": datetime.now(UTC).isoformat(timespec="seconds"), "budget": args.budget,
            "stages": {},
        },
    )  # fmt: skip
    results.save()
    compiling = _start_compile(out, args, results, end) if "compile" in names else None
    deadlines = _deadlines(names, begin, end)
    try:
        first = [name for name in names if name in ("facts", "conformance")]  # nothing there is timed to the percent
        results = _work(out, args, first, deadlines, end) if first else results
        if compiling is not None:
            _finish_compile(compiling, out, results, deadlines.get("conformance", deadlines["compile"]))
        rest = [name for name in names if name not in ("facts", "compile", "conformance")]
        results = _work(out, args, rest, deadlines, end) if rest else results
    finally:
        if compiling is not None and compiling.poll() is None:
            compiling.terminate()
    from .report import report

    results.data["seconds"] = round(time.time() - begin, 1)
    results.save()
    text = report(results.data)
    (out / "report.txt").write_text(text, "utf-8")
    print(text, end="", flush=True)
    (out / "current.json").unlink(missing_ok=True)
    return 0 if all(results.stage(name)["status"] == "done" for name in names) else 1


def _deadlines(names: list[str], begin: float, end: float) -> dict[str, float]:
    """time.time() at which each stage ends: shares of the whole, so that a fast stage leaves its time to the next."""
    shares = {name: seconds for name, seconds in SHARES.items() if name in names}
    whole, so_far, out = sum(shares.values()), 0.0, {}
    for name, seconds in shares.items():
        so_far += seconds
        out[name] = begin + (end - begin) * so_far / whole
    return out


# -- workers -----------------------------------------------------------------------------------------------------------


def _work(out: Path, args: argparse.Namespace, names: list[str], deadlines: dict[str, float], end: float) -> Results:
    """Run stages in workers until all have ended or time is up. Returns what they found."""
    left = list(names)
    for _ in range(_RESTARTS):
        if not left or time.time() >= end:
            break
        plan = {"stages": {name: deadlines[name] for name in left}, "dry": args.dry}
        (out / "current.json").unlink(missing_ok=True)
        began = time.time()
        command = [sys.executable, "-m", "benchmarks.gpu.worker", str(out), json.dumps(plan)]
        worker = subprocess.Popen(command, cwd=ROOT, env=environment())
        why = _watch(worker, out, began, end)
        results = Results.open(out)
        if why:
            _blame(results, out, why, left, began)
        ended = [name for name in left if results.stage(name)["status"] != "running"]
        left = [name for name in left if name not in ended]
    results = Results.open(out)
    for name in left:
        stage = results.stage(name)
        stage["status"] = "out of time" if time.time() >= end - 1 else "failed"
        stage["note"] = stage["note"] or "its worker was ended"
    results.save()
    return results


def _watch(worker: subprocess.Popen[bytes], out: Path, began: float, end: float) -> str:
    """Wait for a worker. Returns why it ended before its work was done, or ""."""
    while worker.poll() is None:
        time.sleep(0.1)
        now, current = time.time(), read_current(out)
        since, limit = (began, _START_SECONDS) if current is None else (current["since"], current["limit"])
        why = ""
        if now >= end:
            why = "the budget was used up"
        elif now - since > limit:
            why = f"no result after {limit:.0f} s"
        if why:
            worker.kill()
            worker.wait()
            return why
    code = worker.returncode
    if code == CRASHED:
        return f"exit code {code}"
    return "" if code == 0 else f"the process ended with exit code {code}"


def _blame(results: Results, out: Path, why: str, left: list[str], began: float) -> None:
    """Record a worker's end under the case that ran. Without one, the first stage is given up: it cannot start."""
    current = read_current(out)
    if current is None or current["since"] < began:
        stage = results.stage(left[0])
        stage["status"], stage["note"] = "failed", f"the worker did not start: {why}"
        print(f"{left[0]}: {stage['note']}", flush=True)
    elif current["case"] not in results.stage(current["stage"])["cases"]:
        stage = results.stage(current["stage"])
        seconds = round(time.time() - current["since"], 3)
        stage["cases"][current["case"]] = {"error": why, "seconds": seconds, "ended": True}
        stage["seconds"] += seconds
        print(f"{current['stage']}: {current['case']}: {why}", flush=True)
    results.save()


# -- compiling, in other processes beside facts and conformance --------------------------------------------------------


def _start_compile(out: Path, args: argparse.Namespace, results: Results, end: float) -> subprocess.Popen[bytes] | None:
    if args.dry:
        from .dry import compiled

        results.stage("compile").update(status="done", cases=compiled())
        results.save()
        return None
    seconds = min(end - time.time(), 120.0)
    command = [sys.executable, str(ROOT / "scripts" / "gpu"), "--prepare", "--target", args.target]
    command += ["--out", str(out), "--budget", f"{seconds:.0f}", "--jobs", str(args.jobs)]
    env = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    log = (out / "compile.log").open("w")
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)


def _finish_compile(process: subprocess.Popen[bytes], out: Path, results: Results, deadline: float) -> None:
    """Wait until its deadline; what is missing is compiled at its first use."""
    stage = results.stage("compile")
    while process.poll() is None and time.time() < deadline:
        time.sleep(0.1)
    late = process.poll() is None
    if late:
        process.terminate()
        process.wait()
    try:
        found: dict[str, Any] = json.loads((out / "compile.json").read_text("utf-8"))
        stage.update(cases=found["cases"], seconds=found["seconds"], note=found["note"])
        failed = any("error" in case for case in found["cases"].values())
        stage["status"] = "out of time" if late else "failed" if failed or process.returncode else "done"
    except (OSError, ValueError, KeyError) as error:
        stage["status"] = "failed"
        stage["note"] = f"no compile.json: {type(error).__name__}: {error}; see compile.log"
    print(f"compile: {stage['status']}, {len(stage['cases'])} kernels, {stage['seconds']:.1f} s {stage['note']}")
    results.save()
