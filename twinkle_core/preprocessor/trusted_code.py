"""Functions of the user's own: found in the folder of trusted code, and known by the digest of their source.

No recipe runs code unless the owner of the process has named a folder for it (setting TWINKLE_TRUSTED_CODE). A function
whose source cannot be pinned down has no identity and is refused, since a result could be reused after it has changed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from twinkle_core.errors import ConfigError
from twinkle_core.preprocessor.code_imports import defined_names, imported_names, installed_versions

SETTING = "TWINKLE_TRUSTED_CODE"


def names_user_code(name: str) -> bool:
    """Whether a processor or filter is named as FILE.py:FUNCTION."""
    return ".py:" in name


def load_function(name: str, folder: Path | None) -> Callable[..., Any]:
    """The function (or class) of FILE.py:FUNCTION in `folder`; the file's own imports from the folder are found there.

    Raises `ConfigError` where no folder is trusted, the file is not inside it, or it defines no such function.
    """
    file, function = _inside(name, folder)
    _versions(file)
    module = _load(file, file.parent)
    found = getattr(module, function, None)
    defined = function in defined_names(file) or getattr(found, "__module__", None) == module.__name__  # a decorator may bring its own
    if not callable(found) or not defined:
        own = sorted(key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == module.__name__)
        raise ConfigError(f"'{name}': {file.name} defines no function {function!r}; it defines {', '.join(own) or 'none'}")
    return found  # type: ignore[no-any-return]


def code_digest(name: str, folder: Path | None) -> str:
    """Hex sha256 of what FILE.py:FUNCTION does: its file's source, that of the files of the same folder that it imports, and the
    versions of the packages that they import. Raises `ConfigError` for imports that none of this covers."""
    file, function = _inside(name, folder)
    digest, versions = _digest(file, function), _versions(file)
    return hashlib.sha256(json.dumps([digest, versions]).encode()).hexdigest() if versions else digest


def function_identity(function: Any) -> str:
    """Hex sha256 that changes when the code of a function, class or object does: see `code_digest`.

    Of an object its class and its attributes count. Raises `ConfigError` for what has no stable form: lambdas, functions
    inside functions, partials, functions typed at a prompt, objects whose attributes are not plain values.
    """
    if isinstance(function, (FunctionType, type)):
        if "<lambda>" in function.__qualname__ or "<locals>" in function.__qualname__:
            raise ConfigError(
                f"{function.__qualname__} is a lambda or lies inside a function, so its source does not tell what it does; "
                "define a function at the top of a module"
            )
        return _digest(_source_file(function), function.__qualname__)
    if inspect.isbuiltin(function) or type(function).__module__ in ("functools", "builtins"):
        raise ConfigError(f"{function!r} has no source of its own that could be told apart; define a function at the top of a module")
    try:
        state = json.dumps(vars(function), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise ConfigError(f"the attributes of this {type(function).__name__} are not plain values, so it has no stable form") from None
    return hashlib.sha256(f"{function_identity(type(function))} {state}".encode()).hexdigest()


def _inside(name: str, folder: Path | None) -> tuple[Path, str]:
    """File and function of FILE.py:FUNCTION. The only place where such a name becomes a path."""
    path, _, function = name.rpartition(":")
    if folder is None:
        raise ConfigError(f"'{name}' is code of your own, and no folder is trusted: set {SETTING} to the folder that holds {path}")
    if not path.endswith(".py") or not function.isidentifier():
        raise ConfigError(f"'{name}' is not of the form FILE.py:FUNCTION")
    root = folder.resolve()
    file = (root / path).resolve()
    if not file.is_relative_to(root):
        raise ConfigError(f"'{name}' lies outside of the folder of trusted code ({SETTING})")
    if not file.is_file():
        raise ConfigError(f"'{name}': there is no file {path} in the folder of trusted code ({SETTING})")
    return file, function


def _digest(file: Path, function: str) -> str:
    listed = [[source.name, hashlib.sha256(source.read_bytes()).hexdigest()] for source in _sources(file)]
    return hashlib.sha256(json.dumps([function, listed]).encode()).hexdigest()


def _sources(file: Path) -> list[Path]:
    """The file, then the files beside it that it imports, directly or through another, by name."""
    found, waiting = {file}, [file]
    while waiting:
        for name in imported_names(waiting.pop()):
            other = file.parent / f"{name}.py"
            if (file.parent / name / "__init__.py").is_file() and not other.is_file():
                raise ConfigError(f"{file.name} imports the package '{name}' beside it; only single files are followed")
            if other.is_file() and not other.resolve().is_relative_to(file.parent):
                raise ConfigError(f"{other.name} beside {file.name} is a link to a file that lies elsewhere")
            if other.is_file() and other not in found:
                found.add(other)
                waiting.append(other)
    return [file, *sorted(found - {file})]


def _versions(file: Path) -> list[tuple[str, str]]:
    sources = _sources(file)
    beside = {source.stem for source in sources}
    return installed_versions(file, {name for source in sources for name in imported_names(source)} - beside)


def _source_file(function: Any) -> Path:
    try:
        found = inspect.getsourcefile(function)
    except TypeError:
        found = None
    if found is None or not Path(found).is_file():
        raise ConfigError(f"{function.__qualname__} has no source file (typed at a prompt, or compiled): put it into a module")
    return Path(found).resolve()


def _load(file: Path, folder: Path) -> ModuleType:
    """The file as a module that runs the source as it is at this moment, whatever was loaded or compiled before."""
    siblings = [source for source in _sources(file) if source != file]
    _forget(siblings)
    spec = spec_from_file_location(f"twinkle_user_code_{file.stem}", file, loader=_PlainSource(file))
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file.name} cannot be loaded as a module")
    module = module_from_spec(spec)
    with _found_first(siblings):
        spec.loader.exec_module(module)
        for sibling in siblings:  # one that a function imports later has to be there by then
            __import__(sibling.stem)
    return module


def _forget(siblings: Sequence[Path]) -> None:
    """Makes way for the files' modules. A name that means another module already cannot mean the file as well."""
    for sibling in siblings:
        loaded = sys.modules.get(sibling.stem)
        if sibling.stem in sys.stdlib_module_names or (loaded is not None and not isinstance(loaded.__loader__, _PlainSource)):
            raise ConfigError(f"{sibling.name} in the folder of trusted code has the name of another module; rename it")
        sys.modules.pop(sibling.stem, None)


class _PlainSource(SourceLoader):
    """Compiles the source each time: a compiled copy is told from an edited file by whole seconds only."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def get_filename(self, fullname: str) -> str:
        return str(self.file)

    def get_data(self, path: str) -> bytes:
        return Path(path).read_bytes()


class _Siblings(MetaPathFinder):
    def __init__(self, files: Sequence[Path]) -> None:
        self.files = {file.stem: file for file in files}

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        file = self.files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file, loader=_PlainSource(file))


@contextmanager
def _found_first(files: Sequence[Path]) -> Iterator[None]:
    finder = _Siblings(files)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
