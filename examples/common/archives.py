"""Fetch, check and unpack archives of text; errors name the file that is damaged or wrong."""

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pooch
import requests
from common.messages import fail, note
from tqdm import tqdm

CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without a byte
ATTEMPTS = 5  # for each URL; those that bring a part that is kept do not count
# An archive may unpack to RATIO times its size, but to FLOOR bytes in any case and to LIMIT bytes
# at most.
LIMIT = 32 << 30  # LM1B, the largest here, has 4 GB
RATIO = 100  # text never reaches it
FLOOR = 64 << 20

COMPRESSIONS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}  # of a single file
DAMAGE = (
    EOFError,
    OSError,
    ValueError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


class Archive(NamedTuple):
    """One file that a preparation starts from."""

    file: str  # its name, in ARCHIVES too
    urls: tuple[str, ...]  # tried in turn
    sha256: str | None = None  # the published sum, where one is known


def bar(total: int | None, title: str, **settings: Any) -> tqdm:
    """Return a progress bar in bytes.

    Outside a terminal it stays, so that the next message begins a new line.
    """
    settings["leave"] = settings.get("leave", True) or not sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=title,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
        **settings,
    )


# ---- fetching ----------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with (
        path.open("rb") as file,
        bar(path.stat().st_size, f"checking {path.name}", leave=False) as progress,
    ):
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            progress.update(len(chunk))
    return digest.hexdigest()


def obtain(archive: Archive, data: Path) -> Path:
    """Return the path of the archive.

    It is in the folder ARCHIVES if the environment has it, else fetched to data/archives.

    A fetched file must have the published sum. A local one may have another; the program prints a
    note, and `check_counts` checks the content. MIRROR of the environment replaces everything
    before the file's name in the URLs.
    """
    if os.environ.get("ARCHIVES"):
        return _local(archive, Path(os.environ["ARCHIVES"]))
    folder = data / "archives"
    path = folder / archive.file
    if path.is_dir():
        fail(f"{path}: is a folder, must be a file; remove it")
    if path.exists() and archive.sha256 is not None and sha256(path) != archive.sha256:
        path.unlink()
        fail(f"{path}: its sha256 is not {archive.sha256}; removed, run again to fetch it anew")
    urls = archive.urls
    mirror = os.environ.get("MIRROR")
    if mirror:
        urls = [f"{mirror.rstrip('/')}/{archive.file}"]
    reasons = []
    for url in urls:
        try:
            fetch = _Resuming(path, resumes=archive.sha256 is not None)
            pooch.retrieve(url, archive.sha256, archive.file, folder, downloader=fetch)
            return path
        except requests.RequestException as error:
            reasons.append(f"{url}: {error}")
        except ValueError:  # pooch: another sum
            fail(f"{archive.file}: {url} gave a file whose sha256 is not {archive.sha256}; removed")
    kept = ""
    if archive.sha256 is not None and _length(_part(path)) > 0:
        kept = f"; {_part(path)}: {_length(_part(path)):,} bytes are kept, run again to go on"
    fail(
        f"{archive.file} cannot be fetched ({'; '.join(reasons)}){kept}; or name a folder that has "
        "it as ARCHIVES"
    )


def _local(archive: Archive, folder: Path) -> Path:
    path = folder / archive.file
    if not path.is_file():
        fail(f"ARCHIVES={folder}: {archive.file} is missing")
    if archive.sha256 is None:
        return path
    own_sum = sha256(path)
    if own_sum != archive.sha256:
        note(
            f"{path}: sha256 {own_sum} is not the published {archive.sha256}; what it holds is "
            "checked instead"
        )
    return path


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class _Resuming:
    """A downloader for pooch that keeps <file>.part and asks for the rest.

    pooch's own starts from the beginning. So does this one for a file without a published sum,
    because nothing would tell that the file there has changed since, and the two parts do not fit.
    """

    def __init__(self, path: Path, resumes: bool):
        self.part = _part(path)
        self.resumes = resumes

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        failures = 0
        while True:
            before = _length(self.part)
            try:
                self._fetch(url)
                break
            except requests.RequestException as error:
                if (
                    self.resumes and _length(self.part) > before
                ):  # a try that brought something begins the count
                    failures = 0
                failures += 1
                is_refused = error.response is not None and error.response.status_code < 500
                if failures >= ATTEMPTS or is_refused:
                    raise
        shutil.move(self.part, output_file)

    def _fetch(self, url: str) -> None:
        """Ask once for what is missing; a server without Range sends everything."""
        have = _length(self.part) if self.resumes else 0
        headers = {"Accept-Encoding": "identity"}
        if have > 0:
            headers["Range"] = f"bytes={have}-"
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            # no bytes after these: the file is complete, or another one
            if response.status_code == 416:
                whole = response.headers.get("Content-Range") == f"bytes */{have}"
                if not whole:
                    self.part.unlink()
                    raise requests.ConnectionError(
                        f"the file there is not the one that {self.part.name} is a part of"
                    )
                return
            response.raise_for_status()
            start = have if response.status_code == 206 else 0
            total = None
            if "Content-Length" in response.headers:
                total = start + int(response.headers["Content-Length"])
            mode = "ab" if start else "wb"
            with (
                self.part.open(mode) as file,
                bar(total, self.part.stem, initial=start) as progress,
            ):
                # it would lose the last bytes of a broken connection
                response.raw.enforce_content_length = False
                for chunk in response.iter_content(CHUNK):
                    file.write(chunk)
                    progress.update(len(chunk))
        if total is not None and _length(self.part) != total:
            raise requests.ConnectionError(
                f"the connection ended after {_length(self.part):,} of {total:,} bytes"
            )


# ---- unpacking ---------------------------------------------------------------------------------


class Refused(ValueError):
    """The archive is unsafe; the message says why."""


def unpack(path: Path, folder: Path, wanted: Callable[[str], bool] | None = None) -> None:
    """Unpack the files of an archive to `folder`.

    End the program if the archive is damaged, unpacks to too many bytes, or has no wanted file.
    Links, special files and names that lead out of `folder` are refused, too (by tarfile's filter
    'data').

    Args:
        path: the archive: .zip, a tar, or a single file as .gz, .bz2, .xz
        folder: the folder to unpack to, which is created if it does not exist
        wanted: a function that returns True for the name of a file to unpack, with / between
            folders; None to unpack all
    """
    folder.mkdir(parents=True, exist_ok=True)
    limit = min(LIMIT, max(FLOOR, RATIO * path.stat().st_size))
    note(f"unpacking {path.name}")
    try:
        if path.suffix == ".zip":
            number = _unpack_zip(path, folder, wanted, limit)
        elif ".tar" in path.suffixes or path.suffix in (".tgz", ".tbz2"):
            number = _unpack_tar(path, folder, wanted, limit)
        elif path.suffix in COMPRESSIONS:
            _unpack_single(path, folder, limit)
            number = 1
        else:
            raise Refused(f"must end in .zip, .tar.*, or one of {', '.join(COMPRESSIONS)}")
    except DAMAGE as error:
        # this machine's fault, such as a full disk
        if isinstance(error, OSError) and error.errno is not None:
            fail(f"{path}: cannot be unpacked: {error.filename or folder}: {error.strerror}")
        if isinstance(error, Refused):
            fail(f"{path}: {error}")
        fail(f"{path}: truncated, damaged or unsafe ({error})")
    if not number:
        fail(f"{path}: has none of the files that are wanted")


def _unpack_single(path: Path, folder: Path, limit: int) -> None:
    with (
        COMPRESSIONS[path.suffix](path) as source,
        (folder / path.stem).open("wb") as target,
    ):
        while chunk := source.read(CHUNK):
            limit = _spend(limit, len(chunk))
            target.write(chunk)


def _spend(limit: int, size: int) -> int:
    if size > limit:
        raise Refused("is larger than such an archive can be")
    return limit - size


def _open_tar(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path)
    except tarfile.ReadError:  # its text has a line for each compression that was tried
        raise Refused("is no tar archive, or damaged at its beginning") from None


def _unpack_tar(path: Path, folder: Path, wanted: Callable[[str], bool] | None, limit: int) -> int:
    number = 0
    with _open_tar(path) as archive:
        for member in archive:
            limit = _spend(limit, member.size)  # files that are skipped are decompressed, too
            if not (member.isreg() or member.isdir()):
                raise Refused(f"{member.name!r} is a link or a special file")
            if member.isreg() and (wanted is None or wanted(member.name)):
                archive.extract(member, folder, set_attrs=False, filter="data")
                number += 1
        while archive.fileobj.read(CHUNK):  # the checksum stands at the end
            pass
    return number


def _unpack_zip(path: Path, folder: Path, wanted: Callable[[str], bool] | None, limit: int) -> int:
    number = 0
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            limit = _spend(limit, member.file_size)
            if not (folder / member.filename).resolve().is_relative_to(folder.resolve()):
                raise Refused(f"{member.filename!r} leads out of the folder to unpack to")
            if not member.is_dir() and (wanted is None or wanted(member.filename)):
                archive.extract(member, folder)  # a link becomes a plain file
                number += 1
    return number


# ---- content -----------------------------------------------------------------------------------


def stream_lines(path: Path, title: str = "") -> Iterator[str]:
    """Yield the lines of a UTF-8 text, with a progress bar. Only a line feed ends a line."""
    with (
        path.open("rb") as file,
        bar(path.stat().st_size, title or f"reading {path.name}", leave=False) as progress,
    ):
        for number, line in enumerate(file, 1):
            progress.update(len(line))
            try:
                yield line.decode()
            except UnicodeDecodeError:
                fail(f"{path}: line {number} is not UTF-8")


def count(lines: Iterable[str]) -> dict[str, int]:
    """Count the lines, tokens (between white space) and types (different tokens) of a text."""
    counts = {"lines": 0, "tokens": 0}
    types = set()
    for line in lines:
        words = line.split()
        counts["lines"] += 1
        counts["tokens"] += len(words)
        types.update(words)
    return {**counts, "types": len(types)}


def check_counts(name: str, found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    """End the program unless `found` has all numbers of `expected`.

    `name` is the text in the message.
    """
    wrong = [
        f"{found[what]:,} {what}, must be {number:,}"
        for what, number in expected.items()
        if found[what] != number
    ]
    if wrong:
        fail(f"{name}: {'; '.join(wrong)}")
