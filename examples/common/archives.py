"""Archives of text: fetched, checked, unpacked; what is truncated, damaged or something else is refused by name."""

import bz2
import gzip
import hashlib
import http.client
import lzma
import os
import shutil
import stat
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, Optional

from common.errors import failing
from tqdm import tqdm

CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without a byte
ATTEMPTS = 5  # in a row that bring nothing, for each URL
PAUSE = 1.0  # seconds before the second attempt, doubled for each further one
LIMIT = 32 << 30  # bytes that an archive may unpack to; LM1B, the largest here, has 4 GB
RATIO = 100  # times its own size, which text never reaches
FLOOR = 64 << 20  # bytes that a small archive may unpack to, whatever its ratio

COMPRESSIONS = {"gz": gzip.open, "tgz": gzip.open, "bz2": bz2.open, "tbz2": bz2.open, "xz": lzma.open}
DAMAGE = (EOFError, OSError, tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)


class Archive(NamedTuple):
    """One file that a preparation starts from."""

    file: str  # its name, in ARCHIVES too
    urls: tuple[str, ...]  # tried in turn
    sha256: Optional[str] = None  # the published sum, where one is known


fail = failing("prepare")


def note(message: str) -> None:
    print(f"prepare: {message}", file=sys.stderr)


def bar(total: Optional[int], title: str, **settings: Any) -> tqdm:
    """A progress bar in bytes; where stderr is no terminal it stays, or the next line would go on behind it."""
    settings["leave"] = settings.get("leave", True) or not sys.stderr.isatty()
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, unit_divisor=1024, dynamic_ncols=True, **settings)


# ---- files that appear when they are complete ------------------------------------------------------------------------


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def complete(path: Path) -> Iterator[Path]:
    """A name beside `path` for a file or folder to be written; it becomes `path` when the block ends well.

    What an earlier, interrupted run left under that name is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    remove(unfinished)
    try:
        yield unfinished
        if unfinished.is_dir():
            remove(path)  # a folder does not replace another
        os.replace(unfinished, path)
    finally:
        remove(unfinished)


# ---- fetching --------------------------------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file, bar(path.stat().st_size, f"checking {path.name}", leave=False) as progress:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            progress.update(len(chunk))
    return digest.hexdigest()


def obtain(archive: Archive, data: Path) -> Path:
    """The archive as a file: ARCHIVES/<file> if the environment names that folder, else data/archives/<file>, fetched.

    A fetched file has the published sum, or the program ends. A local one may have another: that is said, and what
    it holds is checked by `check_counts`. MIRROR in the environment is a URL to fetch from instead, followed by the
    archive's name.
    """
    if os.environ.get("ARCHIVES"):
        return _local(archive, Path(os.environ["ARCHIVES"]))
    path = data / "archives" / archive.file
    if path.is_dir():
        fail(f"{path}: is a folder, must be a file; remove it")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        _fetch(archive, part)
        _check_sum(archive, part)
        part.rename(path)
    else:
        _check_sum(archive, path)
    return path


def _local(archive: Archive, folder: Path) -> Path:
    path = folder / archive.file
    if not path.is_file():
        fail(f"ARCHIVES={folder}: {archive.file} is missing")
    if archive.sha256 is not None:
        found = sha256(path)
        if found != archive.sha256:
            note(f"{path}: sha256 {found} is not the published {archive.sha256}; what it holds is checked instead")
    return path


def _check_sum(archive: Archive, path: Path) -> None:
    if archive.sha256 is None:
        return
    found = sha256(path)
    if found != archive.sha256:
        path.unlink()
        fail(f"{archive.file}: sha256 {found}, must be {archive.sha256}; removed, run again to fetch it anew")


def _urls(archive: Archive) -> tuple[str, ...]:
    mirror = os.environ.get("MIRROR")
    return (f"{mirror.rstrip('/')}/{archive.file}",) if mirror else archive.urls


def _fetch(archive: Archive, part: Path) -> None:
    """Bring `part` to its full length, from where it stands."""
    reasons = []
    for url in _urls(archive):
        failures = 0
        while True:
            before = _length(part)
            try:
                _fetch_once(url, part, archive.file)
                return
            except urllib.error.HTTPError as error:
                reason, worth_retrying = f"{error.code} {error.reason}", error.code >= 500 or error.code == 429
            except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
                reason, worth_retrying = str(getattr(error, "reason", error)), not isinstance(error, ValueError)
            failures = failures + 1 if _length(part) <= before else 1
            if not worth_retrying or failures >= ATTEMPTS:
                break
            time.sleep(PAUSE * 2 ** (failures - 1))
        reasons.append(f"{url}: {reason}")
    kept = f"; {part}: {_length(part):,} bytes are kept, run again to go on" if _length(part) else ""
    fail(f"{archive.file} cannot be fetched ({'; '.join(reasons)}){kept}; or name a folder that has it as ARCHIVES")


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fetch_once(url: str, part: Path, title: str) -> None:
    """One request for what is missing. A server that does not know Range sends everything: then it starts anew."""
    have = _length(part)
    headers = {"User-Agent": "mixhead_plugin recipes", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:  # 416: nothing at or after that byte
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return
        part.unlink()
        raise ConnectionError(f"the file there is not the one begun as {part.name}") from error
    with response:
        resumed = response.headers.get("Content-Range", "").startswith(f"bytes {have}-") if have else False
        start = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        with (
            part.open("ab" if resumed else "wb") as file,
            bar(total, title, initial=start) as progress,
        ):
            while chunk := response.read1(CHUNK):
                file.write(chunk)
                progress.update(len(chunk))
    if total is not None and _length(part) != total:
        raise ConnectionError(f"the connection ended after {_length(part):,} of {total:,} bytes")


# ---- unpacking -------------------------------------------------------------------------------------------------------


TOO_LARGE = "is larger than such an archive can be"


class Refused(Exception):
    """An archive that no honest packer makes."""


def unpack(path: Path, folder: Path, wanted: Optional[Callable[[str], bool]] = None, limit: int = LIMIT) -> None:
    """Unpack the files whose names (with / between folders) are `wanted`, all by default.

    Args:
        path: .zip, .tar.gz, .tgz, .tar.bz2, .tbz2, .tar.xz, or .gz, .bz2, .xz of a single file
        folder: where to; made if it is not there
        wanted: told a name, says whether to unpack it
        limit: bytes that may be written

    The program ends if the archive is truncated or damaged, has links, special files, a name twice or one that leads
    out of `folder`, unpacks to more than `limit` or RATIO times its size, or has no wanted file. What a file may do is
    not taken from the archive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: set[Path] = set()
    try:
        limit = min(limit, max(FLOOR, RATIO * path.stat().st_size))
        for name, size, source in _members(path, limit):
            target = folder / _safe(name)
            if wanted is not None and not wanted(name):
                continue
            if not name.isprintable() or not PurePosixPath(name).name:
                raise Refused(f"{name[:80]!r} is no name of a file")
            if target in files:
                raise Refused(f"{name!r} is there twice")
            if size > limit:
                raise Refused(TOO_LARGE)
            files.add(target)
            _make_room(name, target, folder)
            limit = _copy(source, target, limit)
    except Refused as error:
        fail(f"{path}: {error}")
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # of this machine, such as a full disk
            fail(f"{path}: cannot be unpacked: {error.filename or folder}: {error.strerror}")
        fail(f"{path}: truncated or damaged ({error})")
    if not files:
        fail(f"{path}: has none of the files that are wanted")


def _make_room(name: str, target: Path, folder: Path) -> None:
    """The folders of `target`; a file that another member of the archive made is none."""
    if target.is_dir():
        raise Refused(f"{name!r} is a file and a folder")
    for parent in reversed(target.relative_to(folder).parents):
        if (folder / parent).is_file():
            raise Refused(f"{parent.as_posix()!r} is a file and a folder")
    target.parent.mkdir(parents=True, exist_ok=True)


def _copy(source: IO[bytes], target: Path, limit: int) -> int:
    with target.open("wb") as file:
        while chunk := source.read(CHUNK):
            limit -= len(chunk)
            if limit < 0:
                raise Refused(TOO_LARGE)
            file.write(chunk)
    return limit


def _safe(name: str) -> str:
    """`name`, if it stays inside the folder that it is unpacked to."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name or ":" in name:
        raise Refused(f"{name!r} leads out of the folder to unpack to")
    return name


def _members(path: Path, limit: int) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Name, size and content of every file, in the order of the archive; `limit` is of bytes to be decompressed.

    The size is what the archive says, 0 if it does not.
    """
    kinds = path.name.lower().split(".")[1:]
    if not kinds or kinds[-1] not in ("zip", *COMPRESSIONS):
        fail(f"{path}: must end in one of .zip, {', '.join(f'.{kind}' for kind in COMPRESSIONS)}")
    with path.open("rb") as raw, bar(path.stat().st_size, f"unpacking {path.name}") as progress:
        watched = _Watched(raw, progress)
        if kinds[-1] == "zip":
            yield from _zip_members(watched)
        else:
            with COMPRESSIONS[kinds[-1]](watched, "rb") as opened:
                stream = _Limited(opened, limit + max(FLOOR, limit // 8))  # a tar has more than its files
                if "tar" in kinds or kinds[-1].startswith("t"):
                    yield from _tar_members(stream)
                else:
                    yield path.name.rpartition(".")[0], 0, stream
                while stream.read(CHUNK):  # the checksum stands at the end
                    pass
        progress.update(progress.total - progress.n)


class _Watched:
    """A file opened for reading whose position a bar follows."""

    def __init__(self, file: IO[bytes], progress: tqdm):
        self.file = file
        self.progress = progress

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.progress.update(max(0, self.file.tell() - self.progress.n))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class _Limited:
    """A stream that ends in a refusal: what is skipped is decompressed too."""

    def __init__(self, stream: IO[bytes], limit: int):
        self.stream = stream
        self.left = limit

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise Refused(TOO_LARGE)
        return data


def _zip_members(file: IO[bytes]) -> Iterator[tuple[str, int, IO[bytes]]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise Refused(f"{member.filename!r} is a link or a special file")
            if member.flag_bits & 1:
                raise Refused(f"{member.filename!r} is encrypted")
            if not member.is_dir():
                with archive.open(member) as source:
                    yield member.filename, member.file_size, source


def _tar_members(file: IO[bytes]) -> Iterator[tuple[str, int, IO[bytes]]]:
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            if member.isreg():
                yield member.name, member.size, archive.extractfile(member)
            elif not member.isdir():
                raise Refused(f"{member.name!r} is a link or a special file")


# ---- content ---------------------------------------------------------------------------------------------------------


def read_lines(path: Path, title: str = "") -> Iterator[str]:
    """The lines of a UTF-8 text, broken at line feeds alone, with a progress bar."""
    with path.open("rb") as file, bar(path.stat().st_size, title or f"reading {path.name}", leave=False) as progress:
        for number, line in enumerate(file, 1):
            progress.update(len(line))
            try:
                yield line.decode()
            except UnicodeDecodeError:
                fail(f"{path}: line {number} is not UTF-8")


def count(lines: Iterable[str]) -> dict[str, int]:
    """How many lines, tokens (between white space) and types (different tokens) a text has."""
    found = {"lines": 0, "tokens": 0}
    types = set()
    for line in lines:
        words = line.split()
        found["lines"] += 1
        found["tokens"] += len(words)
        types.update(words)
    return {**found, "types": len(types)}


def check_counts(name: str, found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    """End the program unless everything that is expected was found; `name` says of what."""
    wrong = [
        f"{found[what]:,} {what}, must be {number:,}" for what, number in expected.items() if found[what] != number
    ]
    if wrong:
        fail(f"{name}: {'; '.join(wrong)}")
