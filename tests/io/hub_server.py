"""A local server that speaks the Hugging Face Hub's protocol, as far as huggingface_hub uses it here.

Creates repositories and branches; uploads: preupload, LFS batch, LFS upload, commit (NDJSON); downloads: info, tree,
resolve. Checks tokens, hashes of LFS objects and the YAML of model cards, as the Hub does.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_test"
USER = "tester"
Files = dict[str, bytes]


@dataclass
class Repo:
    """branches: commit by name; commits: files of each."""

    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: Files, message: str = "") -> str:
        listing = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items())
        about = json.dumps([listing, len(self.messages)])
        oid = hashlib.sha1(about.encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        self.messages.append(message)
        return oid

    def oid(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)

    @property
    def main(self) -> Files:
        return self.commits[self.branches["main"]]


@dataclass
class Hub:
    """The server's state. readers: who may only read, by token; fail: path parts that are answered with 500."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    readers: set[str] = field(default_factory=set)
    fail: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)

    def add(self, repo_id: str, files: Files, **about: Any) -> Repo:
        """A repository with these files."""
        self.repos[repo_id] = repo = Repo(**about)
        repo.commit("main", {".gitattributes": b"", **files})
        return repo

    @property
    def writes(self) -> list[str]:
        """Requests that change something."""
        return [r for r in self.requests if not r.startswith(("GET", "HEAD"))]


class NoAnswer(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self.read_body()
        try:
            if any(part in path for part in self.hub.fail):
                raise NoAnswer(500)
            self.check_token(path)
            status, headers, data = self.route(path, body)
        except NoAnswer as no:
            headers = {"X-Error-Code": no.code, "X-Error-Message": no.message}
            status, data = no.status, json.dumps({"error": no.message}).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        out = b""
        while size := int(self.rfile.readline(), 16):
            out += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return out

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def check_token(self, path: str) -> None:
        if self.token and self.token != TOKEN and self.token not in self.hub.readers:
            raise NoAnswer(401, "", "Invalid credentials in Authorization header")
        if self.command in ("POST", "PUT") and not path.startswith(("/lfs/", "/api/validate-yaml")):
            if not self.token:
                raise NoAnswer(401, "", "Invalid username or password.")
            if self.token in self.hub.readers:
                raise NoAnswer(403, "", "You have read access but not the required permissions")

    def route(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        for method, pattern, handle in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method.split():
                result = handle(self, body, *found.groups())
                return result if isinstance(result, tuple) else (200, {}, json.dumps(result).encode())
        raise NoAnswer(404, "", f"no route {self.command} {path}")

    def repo(self, name: str) -> Repo:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self.token):
            raise NoAnswer(404 if self.token else 401, "RepoNotFound", "Repository not found")
        return repo

    def files(self, name: str, revision: str) -> tuple[str, Files]:
        repo = self.repo(name)
        oid = repo.oid(revision)
        if oid is None:
            raise NoAnswer(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid, repo.commits[oid]

    # -- uploads

    def create(self, body: bytes) -> Any:
        asked = json.loads(body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        if name in self.hub.repos:
            taken = {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}
            return 409, {}, json.dumps(taken).encode()
        self.hub.add(name, {}, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        return {"url": f"{self.hub.url}/{name}", "name": name}

    def branch(self, body: bytes, name: str, branch: str) -> Any:
        repo = self.repo(name)
        if branch in repo.branches:
            return 409, {}, b"{}"
        repo.branches[branch] = repo.branches["main"]
        return {}

    def validate(self, body: bytes) -> Any:
        content = json.loads(body)["content"]
        try:
            yaml.safe_load(content.split("---")[1] if content.startswith("---") else "")
        except yaml.YAMLError as error:
            return 400, {}, json.dumps({"errors": [{"message": str(error)}], "warnings": []}).encode()
        return {"errors": [], "warnings": []}

    def preupload(self, body: bytes, name: str, revision: str) -> Any:
        _, held = self.files(name, revision)
        out = []
        for file in json.loads(body)["files"]:
            large = file["path"].endswith((".safetensors", ".gguf")) or file["size"] > 10 << 20
            old = held.get(file["path"])
            found = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            out.append(found | ({} if old is None else {"oid": blob(file["path"], old)}))
        return {"files": out}

    def batch(self, body: bytes, name: str) -> Any:
        self.repo(name)
        objects = []
        for one in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}
            objects.append(one | ({} if one["oid"] in self.hub.objects else {"actions": upload}))
        return {"transfer": "basic", "objects": objects}

    def put(self, body: bytes, oid: str) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise NoAnswer(400, "", "hash differs")
        self.hub.objects[oid] = body
        return {}

    def commit(self, body: bytes, name: str, revision: str) -> Any:
        _, held = self.files(name, revision)
        files, message = dict(held), ""
        for line in body.splitlines():
            key, value = (item := json.loads(line))["key"], item["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise NoAnswer(400, "", f"{value['path']}: the LFS object was not uploaded")
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise NoAnswer(400, "", f"unknown key {key}")
        oid = self.repo(name).commit(revision, files, message)
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}

    # -- downloads

    def info(self, body: bytes, name: str, revision: str | None) -> Any:
        repo = self.repo(name)
        oid, files = self.files(name, revision or "main")
        siblings = [{"rfilename": file} for file in files]
        return {"id": name, "sha": oid, "private": repo.private, "gated": repo.gated, "tags": [], "siblings": siblings}

    def tree(self, body: bytes, name: str, revision: str) -> Any:
        if self.repo(name).gated:
            raise NoAnswer(403, "GatedRepo", "Access to this model is restricted")
        _, files = self.files(name, revision)
        return [
            {"type": "file", "path": file, "size": len(data), "oid": blob(file, data)} for file, data in files.items()
        ]

    def resolve(self, body: bytes, name: str, revision: str, file: str) -> Any:
        oid, files = self.files(name, revision)
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": oid}, b""
        if self.repo(name).gated:
            raise NoAnswer(403, "GatedRepo", "Access to this model is restricted")
        return 200, {"ETag": f'"{blob(file, files[file])}"', "X-Repo-Commit": oid}, files[file]


def blob(name: str, data: bytes) -> str:
    """The id of a file: git's, and of large files that of LFS."""
    if name.endswith((".safetensors", ".gguf")):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", f"/api/models/{_REPO}/branch/(.+)", Handler.branch),
    ("POST", f"/api/models/{_REPO}/preupload/(.+)", Handler.preupload),
    ("POST", f"/{_REPO}\\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/lfs/([0-9a-f]{64})", Handler.put),
    ("POST", f"/api/models/{_REPO}/commit/(.+)", Handler.commit),
    ("GET", f"/api/models/{_REPO}/tree/([^/]+)(?:/)?", Handler.tree),
    ("GET", f"/api/models/{_REPO}(?:/revision/(.+))?", Handler.info),
    ("GET HEAD", f"/{_REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
)


@contextmanager
def serving() -> Iterator[Hub]:
    """A running server on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
