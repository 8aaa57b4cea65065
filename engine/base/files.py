"""Files written whole or not at all, and JSON read with suspicion.

Everything the engine saves goes through `write_atomic`: a temporary file in the same folder, flushed to the
disk, then renamed, so that an interrupt or a full disk leaves the old file as it was. Everything it reads as
JSON goes through `parse_json`, which refuses what Python's own reader lets pass (NaN, duplicate keys, endless
numbers) and turns what would end in a traceback (deep nesting, broken encoding) into one sentence.
"""

from __future__ import annotations

import errno
import json
import math
import numbers
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from headscope.engine.base.errors import ConfigError, HeadscopeError

LARGEST_FILE = 32 * 2**20
"""Bytes of a file from anywhere; a config of 10,000 heads with all evidence has about 4 MB."""

DEEPEST = 16
"""Levels of nesting that our own files can need, with room to spare."""

_LONGEST_INT = 19
"""Digits; every count that we write fits in 64 bits."""


def write_atomic(path: str | os.PathLike[str], data: str | bytes, error: type[HeadscopeError] = ConfigError) -> Path:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part.

    Missing folders are made. A link is followed, so that what it points to is replaced. Raises `error` with one
    sentence if the disk is full or the place cannot be written; the old file is then untouched.
    """
    target = Path(path)
    try:
        raw = data.encode("utf-8") if isinstance(data, str) else data
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(target))
        if target.exists() and not target.is_file():  # /dev/stdout, a pipe: nothing there to replace
            with target.open("wb") as out:
                out.write(raw)
            return target
        target = Path(os.path.realpath(target))
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, raw)
    except (OSError, ValueError) as problem:
        raise _failed(Path(path), problem, error) from problem
    return target


def check_writable(path: str | os.PathLike[str], error: type[HeadscopeError] = ConfigError) -> None:
    """Raise what `write_atomic` would raise for this place, before the work whose result goes there.

    Nothing is left behind: a temporary file is made and removed in the folder, or in the nearest one that exists.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(target))
        if target.exists() and not target.is_file():
            if not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, "no permission", str(target))
            return
        target = Path(os.path.realpath(target))
        with suppress(FileNotFoundError):
            target.lstat()  # a name that is too long
        folder = target.parent
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as problem:
        raise _failed(Path(path), problem, error) from problem


def _failed(path: Path, problem: OSError | ValueError, error: type[HeadscopeError]) -> HeadscopeError:
    failed = error(_cannot_write(path, problem))
    failed.exit_code = 1  # nothing is wrong with what was given, whatever `error` stands for elsewhere
    return failed


def _replace(target: Path, raw: bytes) -> None:
    name = target.parent / f".headscope-{secrets.token_hex(8)}.tmp"
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # the umask applies, as for any new file
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(raw)
            out.flush()
            os.fsync(out.fileno())
        with suppress(OSError):
            os.chmod(name, stat.S_IMODE(target.stat().st_mode))
        os.replace(name, target)
    except BaseException:  # an interrupt too must not leave the temporary file behind
        with suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system allows opening a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _cannot_write(path: Path, problem: OSError | ValueError) -> str:
    code = getattr(problem, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"Could not save {path}: the disk is full; free some space or choose another folder (nothing was changed)."
        )
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"Could not save {path}: no permission to write there; choose another folder."
    if code == errno.EISDIR:
        return f"Could not save {path}: it is a folder; give a file name."
    if code in (errno.ENOTDIR, errno.EEXIST):
        return f"Could not save {path}: a part of the path is a file, not a folder."
    if code == errno.ENAMETOOLONG:
        return f"Could not save {str(path)[:60]}...: the name is too long."
    return f"Could not save {path}: {_short(getattr(problem, 'strerror', None) or problem)}."


def read_bytes(
    path: str | os.PathLike[str], limit: int = LARGEST_FILE, error: type[HeadscopeError] = ConfigError
) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; `error` with one sentence otherwise."""
    source = Path(path)
    try:
        if source.is_dir():
            raise error(f"{source} is a folder; give a file.")
        # Without waiting: a named pipe that nobody writes to would be waited for without end.
        with open(source, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as handle:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
                raise error(f"{source} is not an ordinary file.")
            raw = handle.read(limit + 1)
    except FileNotFoundError as problem:
        raise error(f"There is no file {str(source)[:400]}.") from problem
    except (OSError, ValueError) as problem:
        reason = _short(getattr(problem, "strerror", None) or problem)
        raise error(f"Could not read {str(source)[:200]}: {reason}.") from problem
    if len(raw) > limit:
        raise error(f"{source} is larger than {limit // 2**20} MiB, which is more than such a file can need.")
    return raw


def read_json(
    path: str | os.PathLike[str], error: type[HeadscopeError] = ConfigError, limit: int = LARGEST_FILE
) -> Any:
    """The strict JSON value in a file of at most `limit` bytes (see `parse_json`)."""
    return parse_json(read_bytes(path, limit, error), str(path), error)


def parse_json(raw: bytes, name: str, error: type[HeadscopeError] = ConfigError) -> Any:
    """The value of a JSON text, or `error` with one sentence that names the file and, where known, the line.

    Refused: encodings other than UTF-8, duplicate keys, NaN and infinities (written or by overflow), integers
    beyond 64 bits, nesting deeper than 16, lone surrogates.
    """

    def fail(what: str) -> NoReturn:
        raise error(f"{name}: {what}.")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(items)
        if len(members) != len(items):
            names: set[str] = set()
            twice = next(key for key, _ in items if key in names or names.add(key))  # type: ignore[func-returns-value]
            fail(f"the field {_short(twice)!r} is there twice in one object")
        return members

    def whole(text: str) -> int:
        if len(text.lstrip("-")) > _LONGEST_INT:
            fail(f"a number has {len(text)} digits, which is out of range")
        return int(text)

    def real(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            fail(f"the number {_short(text)} is out of range")
        return value

    def constant(text: str) -> float:
        fail(f"{text} is not a number that JSON or a config can hold")

    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=pairs, parse_int=whole, parse_float=real, parse_constant=constant)
        check_plain(value, "")
    except UnicodeDecodeError as problem:
        fail(f"not UTF-8 text (byte {problem.start})")
    except json.JSONDecodeError as problem:
        fail(f"not valid JSON, line {problem.lineno} column {problem.colno}: {problem.msg}")
    except RecursionError:
        fail(f"nested deeper than {DEEPEST} levels")
    except ValueError as problem:
        fail(_short(problem, 160))
    return value


def check_plain(value: Any, where: str, depth: int = 0) -> None:
    """Raise `ValueError` unless `value` is JSON as we write it: finite, at most 16 deep, Unicode that can be saved."""
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where or 'a field'} has the key {_short(key)}, which is not text")
            check_text(key, where)
            check_plain(item, f"{where}.{key}" if where else key, depth + 1)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            check_plain(item, f"{where}[{position}]", depth + 1)
    elif value is not None and not isinstance(value, bool | int | float):
        raise ValueError(f"{_short(where, 80) or 'the value'} is a {type(value).__name__}, which JSON cannot hold")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{_short(where, 80) or 'the value'} is {value}, which JSON cannot hold")
    elif isinstance(value, int) and abs(value) >= 10**_LONGEST_INT:
        raise ValueError(f"{_short(where, 80) or 'the value'} is out of range")


def check_text(value: str, where: str) -> None:
    """Raise `ValueError` if a text holds half of a surrogate pair, which no file can hold."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{_short(where, 80) or 'a text'} is not valid Unicode") from None


def plain(value: Any) -> Any:
    """A copy of `value` in JSON's own types: tuples as lists, numpy's scalars as numbers. `ValueError` otherwise."""
    try:
        number = _plain(value)
        check_plain(number, "")
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    return number


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return value


def one_line(value: Any) -> str:
    """JSON on one line, keys in the order given."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def indented(value: Any, level: int) -> str:
    """JSON over several lines as it stands inside an object at `level`, two spaces a level."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2)
    return text.replace("\n", "\n" + "  " * level)


def printable(path: str | os.PathLike[str]) -> str:
    """A path as text that every file can hold: bytes of it that are no UTF-8 are written as escapes."""
    return os.fspath(path).encode("utf-8", "backslashreplace").decode("utf-8")


def listing(names: Iterable[Any], most: int = 6) -> str:
    """Some names for a sentence: `a, b, c and 4 more`."""
    items = [str(name) for name in names]
    if len(items) <= most:
        return ", ".join(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"


def _short(value: Any, most: int = 60) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else text[: most - 3] + "..."
