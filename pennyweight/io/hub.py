"""Hugging Face Hub: reads repositories by their id, and uploads folders, through huggingface_hub.

huggingface_hub is an optional package, imported where it is used. It reads HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and
HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..core.formats import all_formats
from ..core.model_arguments import check_arguments
from ..planning.quantize_report import Report
from ..support.arguments import hint, show
from ..support.errors import ArgumentTypeError
from ..support.extras import install
from ..support.version import __version__
from .atomic_write import is_staging
from .checkpoint import INDEX, SINGLE
from .codecs import CODECS
from .config_files import ENDINGS, METHOD, NAMES, folder_of
from .detect_format import PICKLES, open
from .file import CheckpointError, similar_path
from .lazy_checkpoint import Opened
from .model_card import CARD, MAX_CARD_BYTES, fill_in_repository, is_generated, model_card
from .replace_checkpoint import is_ours, is_partial_name
from .strict_json import read_bytes, resolve_inside

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/\w[\w.-]*(@\w[\w.-]*(/\w[\w.-]*)*)?", re.ASCII)
_FILES = (".safetensors", ".gguf", ".json", ".yaml", ".yml", *PICKLES)  # "org/name" does not end like a file
# Data only: no code, and pickles only where they are asked for. Folders of a repository hold other formats of the same
# weights ("onnx/"); those that start with a digit belong to sentence-transformers
_DATA = [*(f"*{ending}" for ending in ENDINGS), *(f"{name}*" for name in NAMES)]
_ELSEWHERE = ["[!0-9]*/*", "*/*.safetensors"]


class HubError(ValueError):
    """A repository cannot be read or written. The message names it, the local folder where there is one, and a
    remedy."""


def _library(purpose: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.utils  # the package does not import it by itself
    except ImportError:
        raise HubError(f"{purpose} needs huggingface_hub: {install('hub')}") from None
    return huggingface_hub


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error; None if there was no answer."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


@contextmanager
def _explained(explain: Callable[[BaseException], str]) -> Iterator[None]:
    """Raise every error of the network, of the Hub or of the disk as a HubError."""
    from huggingface_hub.errors import HTTPError  # of the HTTP library that this release uses

    try:
        yield
    except HubError:
        raise
    except RuntimeError as error:  # of an upload's threads
        raise HubError(explain(error.__cause__ or error)) from error
    except (HTTPError, OSError, ValueError) as error:
        raise HubError(explain(error)) from error


# -- reading -----------------------------------------------------------------------------------------------------------


def is_hub_id(path: str) -> bool:
    """Whether a path can be a Hub id: "org/name" or "org/name@revision"."""
    return _ID.fullmatch(path) is not None and not path.partition("@")[0].endswith(_FILES)


def local_path(path: str | os.PathLike[str], allow_pickle: bool = False) -> str:
    """A local path as it is; for "org/name" or "org/name@revision" the path of the downloaded files.

    An existing file or folder of that name is taken first. Files come from the cache of huggingface_hub where they are
    there, without a network too. Only data files are downloaded: weights, configs, tokenizers; no code. The result is
    a folder, or the one file that has the weights.

    allow_pickle: download torch.save files if the repository has no other weights.

    Raises HubError if the repository, its revision or its weights cannot be read.
    """
    path = os.fspath(path)
    return path if os.path.lexists(path) or not is_hub_id(path) else _download(path, allow_pickle)


def _download(name: str, allow_pickle: bool) -> str:
    hub = _library(f"{name} is not a local path; reading it from the Hub")
    repo, _, revision = name.partition("@")

    def snapshot(patterns: list[str]) -> str:
        return hub.snapshot_download(
            repo, revision=revision or None, allow_patterns=patterns, ignore_patterns=_ELSEWHERE,
            library_name="pennyweight", library_version=__version__,
        )  # fmt: skip

    with _explained(lambda error: _why_not_read(name, error)):
        folder = snapshot([*_DATA, "*.safetensors"])
        names = _names(hub, repo, revision, folder)
        if not {SINGLE, INDEX} & {*names}:
            folder = _other_weights(name, folder, names, snapshot, allow_pickle)
    return folder


def _names(hub: Any, repo: str, revision: str, folder: str) -> list[str]:
    """Names of a snapshot's files; if it has no weights, of the repository's, if that can be reached."""
    here = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    if {SINGLE, INDEX} & {*here} or _offline():
        return here
    from huggingface_hub.errors import HTTPError

    try:
        return [name for name in _repository_files(hub.HfApi(), repo, revision or None) if "/" not in name]
    except (HTTPError, OSError):
        return here


def _repository_files(api: Any, repo: str, revision: str | None) -> list[str]:
    """Names of a repository's files. One request without retries, unlike list_repo_files, which waits for a minute
    where there is no network."""
    return sorted(file.rfilename for file in api.repo_info(repo, revision=revision).siblings or ())


def _other_weights(
    name: str, folder: str, names: list[str], snapshot: Callable[[list[str]], str], allow_pickle: bool
) -> str:
    """The path of weights with another name than the usual one: one safetensors file, one GGUF model, one pickle."""
    repo = name.partition("@")[0]
    for endings in ((".safetensors",), (".gguf",), PICKLES):
        some = [n for n in names if n.endswith(endings) and n != "golden.safetensors"]
        models = [n for n in some if "-of-" not in n or "-00001-of-" in n]  # a split model counts once
        if endings == PICKLES and some and not allow_pickle:
            raise HubError(
                f"{name}: its weights are pickles ({some[0]}), which can run code; pass --allow-pickle to a command "
                "that has it if you trust the source"
            )
        if len(models) > 1:
            raise HubError(
                f"{name}: has {len(models)} files of weights ({', '.join(models[:4])}); download one with "
                f"hf download {repo} {models[0]} --local-dir FOLDER, and pass its path"
            )
        if models:
            return os.path.join(snapshot([*_DATA, *some]), models[0])
    raise HubError(f"{name}: {folder if _offline() else repo} has no weights in safetensors or GGUF files")


def _why_not_read(name: str, error: BaseException) -> str:
    from huggingface_hub import constants, errors

    repo, _, revision = name.partition("@")
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name}: the repository is gated; accept its terms at {_endpoint()}/{repo} and log in with hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name}: {repo} has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError) or _status(error) == 401:
        return (
            f"{name}: not found, neither as a local path{_close_to(repo)} nor as a repository of {_endpoint()}; check "
            "the spelling; a private repository needs hf auth login"
        )
    status = _status(error)
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.HTTPError, ConnectionError)) and status is None:
        reached = "HF_HUB_OFFLINE is set" if _offline() else f"{_endpoint()} cannot be reached"
        whole = "not complete" if isinstance(error, errors.IncompleteSnapshotError) else "not"
        return f"{name}: no local path{_close_to(repo)}, {whole} in the cache {constants.HF_HUB_CACHE}, and {reached}"
    return f"{name}: cannot be read from {_endpoint()}: {_first_line(error)}"


def _close_to(repo: str) -> str:
    """ " (did you mean './name'?)", for a similar name in the parent folder or in this one."""
    close = similar_path(repo)
    return hint([close]) if close else ""


# -- writing -----------------------------------------------------------------------------------------------------------


@check_arguments()
def push_to_hub(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    token: str | None = None,
    card: bool = True,
) -> str:
    """Upload a folder with a complete checkpoint to the Hugging Face Hub; return the address of the commit.

    folder    a checkpoint of any format that :func:`open` reads, with its configs and tokenizer. All of its visible
              files are uploaded, and those of subfolders; remains of other checkpoints and of interrupted runs are not
    repo_id   "org/name", or "name" for the user of the token. Created if missing
    private   of a new repository; True for one that exists and is public is an error
    revision  a branch, created if missing; default: the main one
    message   of the commit
    token     default: that of ``hf auth login`` or HF_TOKEN
    card      add a model card (README.md) to quantized weights if neither the folder nor the repository has one. A card
              that someone wrote is never replaced; one that this library generated is

    One commit adds all files and removes the weights that it replaces, so a reader sees the old checkpoint or the new
    one. Raises HubError with a remedy: an incomplete folder (nothing is sent), no token, no permission, no network.
    """
    if not isinstance(repo_id, str):
        raise ArgumentTypeError(f'repo_id must be a name such as "org/name", got {show(repo_id)}')
    folder = os.fspath(folder)
    hub = _library("push_to_hub")
    failed = f"{folder} was not uploaded to {repo_id}"
    with _explained(lambda error: f"{failed}: {_first_line(error)}"):
        hub.utils.validate_repo_id(repo_id)
        names = _complete(folder)
    api = hub.HfApi(token=token, library_name="pennyweight", library_version=__version__)
    if _offline():
        raise HubError(f"{failed}: HF_HUB_OFFLINE is set; unset it")
    if not (token or hub.get_token()):
        raise HubError(f"{failed}: there is no token; log in with hf auth login, or set HF_TOKEN")
    with _explained(lambda error: f"{failed}: {_why_not_written(error)}"):
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo).private:
            raise HubError(f"{failed}: {repo} exists and is public; make it private in its settings, or choose another")
        if revision is not None and not revision.startswith("refs/pr/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        there = _repository_files(api, repo, revision)
        operations = _operations(hub, folder, names, repo, revision, there, token, card)
        done = api.create_commit(
            repo, operations, commit_message=message or f"Upload {os.path.basename(os.path.realpath(folder))}",
            revision=revision,
        )  # fmt: skip
    return str(done.commit_url)


def _complete(folder: str) -> list[str]:
    """Names of the files to upload, with "/" between folders. Raises ValueError if the checkpoint is not complete."""
    if not os.path.isdir(folder):
        raise CheckpointError(folder, None, "is not a folder")
    left = sorted(name for name in os.listdir(folder) if is_partial_name(name))
    if left:
        raise CheckpointError(
            folder, None, f"is not complete: {left[0]} belongs to an interrupted run; run the same command again to "
            "finish it"
        )  # fmt: skip
    with open(folder) as checkpoint:
        _check_config(checkpoint)
        own = {os.path.basename(path) for path in checkpoint.files}
    real, names = os.path.realpath(folder), []
    for at, folders, files in os.walk(real):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__" and not is_staging(f))
        for file in sorted(files):
            name = os.path.relpath(os.path.join(at, file), real)
            if not file.startswith(".") and (name in own or not is_ours(name)):
                resolve_inside(real, name)
                names.append(name.replace(os.sep, "/"))
    return names


def _check_config(checkpoint: Opened) -> None:
    """Raise CheckpointError if config.json declares our format and the files do not have it: another library may have
    written them over ours."""
    method = (checkpoint.config or {}).get("quantization_config")
    if isinstance(method, dict) and method.get("quant_method") == METHOD and not checkpoint.quantized:
        raise CheckpointError(
            folder_of(checkpoint.path), None, "config.json declares quantized weights, and the files have none; write "
            "the folder again"
        )  # fmt: skip


def _operations(
    hub: Any, folder: str, names: list[str], repo: str, revision: str | None, there: list[str], token: str | None,
    card: bool,
) -> list[Any]:  # fmt: skip
    """What the commit adds and removes."""
    real, text = os.path.realpath(folder), None
    if CARD in names:
        text = read_bytes(resolve_inside(real, CARD), MAX_CARD_BYTES)
        names = [name for name in names if name != CARD]
    elif card:
        with open(folder) as checkpoint:
            text = model_card(folder).encode() if checkpoint.quantized else None
    if text is not None and is_generated(text):
        if CARD in there:
            old = hub.hf_hub_download(repo, CARD, revision=revision, token=token)
            text = fill_in_repository(text, repo) if is_generated(read_bytes(old, MAX_CARD_BYTES)) else None
        else:
            text = fill_in_repository(text, repo)
    add = [hub.CommitOperationAdd(name, resolve_inside(real, name)) for name in names]
    if text is not None:
        add.append(hub.CommitOperationAdd(CARD, text))
    old_weights = [name for name in there if is_ours(name) and name not in names] if any(map(is_ours, names)) else []
    return [*add, *(hub.CommitOperationDelete(name) for name in old_weights)]


def uploaded_card(folder: str, repo: str, card: bytes, *, base: str = "", report: Report | None = None) -> bytes:
    """The card to upload with a folder that another library is about to upload with ``card``, a generated one.

    base    Hub id of the float model; its license, language and task are carried over if its card can be read
    report  of the quantization

    Tags of ``card`` are kept, without those that name formats of weights.
    """
    from huggingface_hub import ModelCard, hf_hub_download
    from huggingface_hub.errors import HTTPError

    source, tags = "", []
    with suppress(ValueError):  # invalid metadata
        known = {*(f.name for f in all_formats()), *(codec.name for codec in CODECS)}
        tags = [tag for tag in ModelCard(card.decode("utf-8", "replace")).data.tags or () if tag not in known]
    if base:
        with suppress(HTTPError, OSError, ValueError):  # it has no card, or is not on this Hub
            source = os.path.dirname(hf_hub_download(base, CARD))
    try:
        text = model_card(folder, source=source, base=base, report=report, tags=tags)
    except CheckpointError:  # the weights are elsewhere, as of adapters
        return card
    return fill_in_repository(text.encode(), repo)


def _why_not_written(error: BaseException) -> str:
    from huggingface_hub import errors

    status = _status(error)
    again = "; nothing was changed there, run the same command again"
    if status == 401 and not isinstance(error, errors.GatedRepoError):
        return f"{_endpoint()} refused the token (401); log in again with hf auth login, or set a valid HF_TOKEN"
    if status == 403:
        return "the token has no permission to write there (403); use one with the role write, or another repository"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the repository was not found (404); check its name and the organizations of the token"
    if status is not None:
        return f"{_endpoint()} answered {_first_line(error)}{again}"
    if isinstance(error, (errors.HTTPError, ConnectionError)):
        return f"{_endpoint()} cannot be reached ({_first_line(error)}){again}"
    return _first_line(error)
