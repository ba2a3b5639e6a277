"""Archives are fetched from a server on loopback, checked, unpacked or refused."""

import bz2
import gzip
import hashlib
import random
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from common import archives
from common.archives import Archive, count, obtain, unpack
from common.files import written_whole
from recipes import refused_here, tar_of, zip_of

CONTENT = bytes(range(256)) * 10_000  # 2.5 MB: several chunks
TEXT = b"a line\nand another\n"


pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def archive(server):
    (server.folder / "text.bin").write_bytes(CONTENT)
    return Archive("text.bin", (f"{server.url}/text.bin",), hashlib.sha256(CONTENT).hexdigest())


def test_it_is_fetched_once(archive, server, tmp_path):
    for _ in range(2):
        assert obtain(archive, tmp_path).read_bytes() == CONTENT
    assert server.requests == [("/text.bin", None)]
    assert [path.name for path in (tmp_path / "archives").iterdir()] == ["text.bin"]


def test_a_connection_that_breaks_is_taken_up_where_it_broke(archive, server, tmp_path):
    server.faults += ["drop", "drop"]
    assert obtain(archive, tmp_path).read_bytes() == CONTENT
    starts = [
        int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        for _, asked in server.requests
    ]
    assert len(starts) == 3 and starts[0] < starts[1] < starts[2]


def test_an_interrupted_program_goes_on_where_it_stopped(
    archive, server, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(archives, "ATTEMPTS", 1)
    server.faults += ["drop"]
    refused_here(capsys, obtain, archive, tmp_path)
    kept = (tmp_path / "archives" / "text.bin.part").stat().st_size
    assert kept > len(CONTENT) // 3
    assert obtain(archive, tmp_path).read_bytes() == CONTENT
    assert server.requests[1:] == [("/text.bin", f"bytes={kept}-")]


def test_a_file_without_a_published_sum_is_fetched_from_the_beginning(
    archive, server, tmp_path, monkeypatch, capsys
):
    """The file there may be another one by now, and nothing would tell it."""
    monkeypatch.setattr(archives, "ATTEMPTS", 2)
    without_sum = archive._replace(sha256=None)
    server.faults += ["drop", "drop"]
    assert "are kept" not in refused_here(capsys, obtain, without_sum, tmp_path)
    assert (tmp_path / "archives" / "text.bin.part").exists()
    (server.folder / "text.bin").write_bytes(CONTENT[::-1])
    assert obtain(without_sum, tmp_path).read_bytes() == CONTENT[::-1]
    assert server.requests == [("/text.bin", None)] * 3
    assert [path.name for path in (tmp_path / "archives").iterdir()] == ["text.bin"]


def test_a_server_that_cannot_resume_sends_it_all_again(archive, server, tmp_path):
    server.faults += ["drop", "no-range"]
    assert obtain(archive, tmp_path).read_bytes() == CONTENT
    assert len(server.requests) == 2


@pytest.mark.parametrize("part", [CONTENT, CONTENT + b"?"], ids=["whole", "too long"])
def test_a_part_that_is_no_part_does_no_harm(part, archive, server, tmp_path):
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives" / "text.bin.part").write_bytes(part)
    assert obtain(archive, tmp_path).read_bytes() == CONTENT


def test_the_next_url_is_tried(archive, server, tmp_path):
    urls = (f"{server.url}/gone", "http://127.0.0.1:9/refused", *archive.urls)
    assert obtain(archive._replace(urls=urls), tmp_path).read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["/gone", "/text.bin"]


def test_a_mirror_replaces_everything_before_the_name(archive, server, tmp_path, monkeypatch):
    monkeypatch.setenv("MIRROR", f"{server.url}/")
    elsewhere = archive._replace(urls=("http://127.0.0.1:9/somewhere/else/text.bin",))
    assert obtain(elsewhere, tmp_path).read_bytes() == CONTENT
    assert server.requests == [("/text.bin", None)]


def test_what_has_another_sum_is_removed_and_named(archive, server, tmp_path, capsys):
    (server.folder / "text.bin").write_bytes(b"an error page")
    assert archive.sha256 in refused_here(capsys, obtain, archive, tmp_path)
    assert list((tmp_path / "archives").iterdir()) == []


def test_a_local_archive_of_another_sum_is_accepted_aloud(
    archive, server, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ARCHIVES", str(server.folder))
    (server.folder / "text.bin").write_bytes(TEXT)
    assert obtain(archive, tmp_path) == server.folder / "text.bin"
    assert f"is not the published {archive.sha256}" in capsys.readouterr().err


def test_a_file_without_a_published_sum_is_not_read_to_compute_one(
    archive, server, tmp_path, monkeypatch
):
    monkeypatch.setattr(archives, "sha256", lambda path: pytest.fail("it was read"))
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives" / "text.bin").write_bytes(TEXT)
    assert obtain(archive._replace(sha256=None), tmp_path).read_bytes() == TEXT
    assert server.requests == []


FILES = {
    "folder/train.txt": TEXT,
    "folder/deep/valid.txt": random.Random(0).randbytes(200_000),
    "readme": b"",
}


def make(path, files):
    return zip_of(path, files) if path.suffix == ".zip" else tar_of(path, files)


KINDS = ["a.zip", "a.tar.gz", "a.tgz", "a.tar.bz2", "a.tar.xz"]


@pytest.mark.parametrize("name", KINDS)
def test_everything_is_unpacked(name, tmp_path):
    files = FILES if name != "a.zip" else {"folder/": b"", **FILES}
    unpack(make(tmp_path / name, files), tmp_path / "out")
    found = {
        str(p.relative_to(tmp_path / "out")): p.read_bytes()
        for p in (tmp_path / "out").rglob("*")
        if p.is_file()
    }
    assert found == FILES


@pytest.mark.parametrize(
    "name, compress", [("train.de.gz", gzip.compress), ("train.de.bz2", bz2.compress)]
)
def test_a_single_compressed_file_is_unpacked_to_its_name(name, compress, tmp_path):
    (tmp_path / name).write_bytes(compress(TEXT))
    unpack(tmp_path / name, tmp_path / "out")
    assert (tmp_path / "out" / "train.de").read_bytes() == TEXT


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("harm", ["empty", "cut", "damaged", "garbage"])
def test_a_broken_archive_is_refused_by_name(name, harm, tmp_path, capsys):
    path = make(tmp_path / name, FILES)
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = bytes(byte ^ 0x55 for byte in content[middle : middle + 40])
    broken = {
        "empty": b"",
        "cut": content[:-5],
        "damaged": content[:middle] + damaged + content[middle + 40 :],
    }
    broken["garbage"] = random.Random(1).randbytes(3000)
    path.write_bytes(broken[harm])
    assert refused_here(capsys, unpack, path, tmp_path / "out").startswith(f"{path}: ")


@pytest.mark.parametrize("kind", ["zip", "tgz"])
@pytest.mark.parametrize("name", ["../outside", "folder/../../outside", "/tmp/outside-of-it"])
def test_no_name_leads_out_of_the_folder(kind, name, tmp_path, capsys):
    path = make(tmp_path / f"a.{kind}", {name: TEXT})
    if not (kind == "tgz" and name.startswith("/")):  # the filter takes the slash away
        assert refused_here(capsys, unpack, path, tmp_path / "out").startswith(f"{path}: ")
    else:
        unpack(path, tmp_path / "out")
    assert not (tmp_path / "outside").exists() and not Path("/tmp/outside-of-it").exists()


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_links_and_special_files_in_a_tar_are_refused(kind, tmp_path, capsys):
    member = tarfile.TarInfo("folder/link")
    member.type, member.linkname = kind, "/etc/passwd"
    path = tar_of(tmp_path / "a.tgz", FILES, [member])
    assert "'folder/link'" in refused_here(capsys, unpack, path, tmp_path / "out")


def test_a_link_in_a_zip_becomes_a_plain_file(tmp_path):
    member = zipfile.ZipInfo("link")
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    unpack(zip_of(tmp_path / "a.zip", {member: b"/etc/passwd"}), tmp_path / "out")
    assert not (tmp_path / "out" / "link").is_symlink()


@pytest.mark.parametrize("name", ["a.zip", "a.tgz", "train.de.gz"])
def test_a_bomb_is_refused(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(archives, "FLOOR", 1 << 20)
    path = tmp_path / name
    bomb = bytes(2 << 20)
    path.write_bytes(gzip.compress(bomb)) if name == "train.de.gz" else make(path, {"bomb": bomb})
    assert "larger than such an archive can be" in refused_here(
        capsys, unpack, path, tmp_path / "out"
    )


@pytest.mark.parametrize("inner", [".", "file"], ids=["file", "folder"])
def test_what_is_written_appears_only_when_it_is_complete(inner, tmp_path):
    def write(path, text):
        (path / inner).parent.mkdir(exist_ok=True)
        (path / inner).write_text(text)

    target = tmp_path / "new"
    with pytest.raises(ZeroDivisionError), written_whole(target) as unfinished:
        write(unfinished, "half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []

    write(target.with_name("new.unfinished"), "left by a program that was killed")
    for text in ("first", "second"):
        with written_whole(target) as unfinished:
            assert not unfinished.exists()
            write(unfinished, text)
        assert (target / inner).read_text() == text
    assert list(tmp_path.iterdir()) == [target]


def test_counts():
    assert count(["a b  a\n", "\n", " c\u2028c \n"]) == {"lines": 3, "tokens": 5, "types": 3}
    assert count([]) == {"lines": 0, "tokens": 0, "types": 0}
