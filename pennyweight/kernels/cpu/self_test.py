"""Whether the native library may be used on a platform where its makers could not run it.

There `pennyweight doctor` compares every kernel with the reference, once, in a process of its own: a library that
crashes ends that process only. The verdict is kept for this library, torch release and machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from ...support import environment
from ...support.cache_folder import cache_folder

TIMEOUT = 300  # seconds; it takes about ten


def verdict(library: Path) -> str | None:
    """None if the library passes the self-test, else why it does not."""
    digest = hashlib.sha256(library.read_bytes())
    cpu = torch.backends.cpu.get_cpu_capability()
    digest.update(f"{torch.__version__} {sys.version} {sys.platform} {platform.machine()} {cpu}".encode())
    kept = cache_folder() / f"self-test-{digest.hexdigest()[:32]}.json"
    try:
        found = json.loads(kept.read_text("utf-8"))["failed"]
        return found if isinstance(found, str) else None
    except (OSError, ValueError, LookupError):  # none was kept
        pass
    failed = _run()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"failed": failed}), "utf-8")
    except OSError:  # nowhere to keep it: the next process tests again
        pass
    return failed


def _run() -> str | None:
    command = [sys.executable, "-m", "pennyweight", "doctor", "--json"]
    env = {**os.environ, environment.NATIVE.name: "1"}  # the library without a self-test
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", check=False, env=env, timeout=TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the self-test did not run: {error}"
    try:
        health = json.loads(done.stdout)
    except ValueError:
        return f"the self-test ended with status {done.returncode}"
    problems = [str(problem) for problem in health["problems"]]
    return "; ".join(problems) or None
