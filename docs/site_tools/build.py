"""Builds the documentation site; started by scripts/docs.

scripts/docs                  the working tree, into build/site/latest; warnings and dead links are errors
scripts/docs --tag v0.1.0     a tag, into build/site/v0.1.0, with the package of that tag
scripts/docs --serve          build, then serve build/site on this machine
scripts/docs --linkcheck      ask the hosts of external links; needs a network
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import check_links, notebooks, versions
from .project import DOCS, ROOT

SITE = ROOT / "build" / "site"


def sphinx(builder: str, source: Path, out: Path, environment: dict[str, str] | None = None) -> None:
    """Run Sphinx with warnings as errors, in a process of its own.

    It writes all pages (-a, -E): those without changes would keep the navigation of their last build.
    """
    doctrees = ROOT / "build" / "doctrees" / out.name
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "2", "-a", "-E", "-b", builder]
    command += ["-d", str(doctrees), str(source), str(out)]
    if subprocess.run(command, check=False, env={**os.environ, **(environment or {})}).returncode:
        raise SystemExit("the site was not built: see the warnings above")


def build_working_tree() -> Path:
    started = time.monotonic()
    executed = notebooks.write_all()
    print(f"{executed} notebooks executed ({time.monotonic() - started:.0f} s)", flush=True)
    out = SITE / versions.LATEST
    sphinx("html", DOCS, out, {"DOCS_VERSION": versions.LATEST})
    return out


def build_tag(tag: str) -> Path:
    """Build a tag's own pages with its own package and site_tools, in a temporary worktree."""
    if not versions.is_tag(tag):
        raise SystemExit(f"--tag {tag}: expected a version such as v0.1.0")
    out = SITE / tag
    with tempfile.TemporaryDirectory() as folder:
        tree, package = Path(folder, "tree"), Path(folder, "package")
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), tag], cwd=ROOT, check=True)
        try:
            if not (tree / "docs" / "conf.py").exists():
                raise SystemExit(f"{tag} has no documentation site: it was tagged before docs/conf.py was added")
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(package), str(tree)]
            subprocess.run(pip, check=True)  # with its native kernels
            environment = {
                "PYTHONPATH": os.pathsep.join([str(package), str(tree / "docs")]),
                "DOCS_VERSION": tag,
            }
            write = [sys.executable, "-c", "from site_tools import notebooks; notebooks.write_all()"]
            subprocess.run(write, check=True, cwd=tree, env={**os.environ, **environment})
            sphinx("html", tree / "docs", out, environment)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    return out


def check(out: Path) -> None:
    """Write the list of external links; exit with the dead links, if any."""
    found = check_links.check(out)
    (out / check_links.EXTERNAL).write_text("\n".join(found.external) + "\n", encoding="utf-8")
    for line in found.dead:
        print(f"dead link: {line}", file=sys.stderr)
    if found.dead:
        raise SystemExit(f"{len(found.dead)} dead links")
    print(f"{found.links} links checked, {len(found.external)} of them external addresses (not asked)")


def serve(port: int) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    print(f"http://localhost:{port}/ (Ctrl-C stops it)", flush=True)
    server = http.server.ThreadingHTTPServer(("localhost", port), handler)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("scripts/docs", description=__doc__, formatter_class=form)
    parser.add_argument("--tag", help="build this tag instead of the working tree")
    parser.add_argument("--base", default="/", help="path under which the host serves the versions (default: /)")
    parser.add_argument("--serve", action="store_true", help="serve the site after the build")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--linkcheck", action="store_true", help="only check external links, through the network")
    options = parser.parse_args()
    if options.linkcheck:
        notebooks.write_all()
        sphinx("linkcheck", DOCS, ROOT / "build" / "linkcheck")
        return
    started = time.monotonic()
    out = build_tag(options.tag) if options.tag else build_working_tree()
    versions.write(SITE, options.base)
    check(out)
    print(f"{out.relative_to(ROOT)}/index.html ({time.monotonic() - started:.0f} s)", flush=True)
    if options.serve:
        serve(options.port)


if __name__ == "__main__":
    main()
