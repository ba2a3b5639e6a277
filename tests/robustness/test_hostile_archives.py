"""Archives that no honest packer makes: every preparation refuses them in one line and writes nothing elsewhere."""

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.robustness.inprocess import ROOT, refusal

EXAMPLES = ROOT / "examples"


ENOUGH = 1 << 20  # bytes


@pytest.fixture(autouse=True)
def a_small_floor(recipes, monkeypatch):
    """So that a bomb is one of megabytes."""
    monkeypatch.setattr(archives(), "FLOOR", ENOUGH)


def archives():
    from common import archives

    return archives


def listing(folder: Path):
    """Everything below `folder` with what it is and holds."""
    return {
        path: os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


# ---- what archives may hold: member by member ------------------------------------------------------------------------

GOOD = "folder/train.txt"
TEXT = b"a line\n"


def tar_member(name, content=b"", **settings):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for key, value in settings.items():
        setattr(member, key, value)
    return member, content


def tar_of(path, *members, size=None):
    with tarfile.open(path, "w:gz") as archive:
        for member, content in ((tar_member(GOOD, TEXT)), *members):
            archive.addfile(member, io.BytesIO(content))
    return path


def zip_of(path, *members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in ((GOOD, TEXT), *members):
            archive.writestr(name, content)
    return path


def zip_entry(name, mode, content=b"/etc/passwd"):
    member = zipfile.ZipInfo(name)
    member.external_attr = mode << 16
    return member, content


def link(kind, target):
    return tar_member("folder/link", type=kind, linkname=target)


LEAVES = "leads out of the folder to unpack to"
SPECIAL = "is a link or a special file"
LARGE = "is larger than such an archive can be"
NO_NAME = "is no name of a file"
TWICE = "is there twice"
BOTH = "is a file and a folder"

TARS = {
    **{
        f"the name {name!r}": ([tar_member(name, TEXT)], LEAVES)
        for name in (
            "../out",
            "folder/../../out",
            "/tmp/out",
            "..",
            "./../out",
            "a/b/../../../out",
            "C:\\out",
            "..\\out",
        )
    },
    "a symbolic link out": ([link(tarfile.SYMTYPE, "../../outside")], SPECIAL),
    "a symbolic link inside": ([link(tarfile.SYMTYPE, "train.txt")], SPECIAL),
    "a symbolic link, then a file behind it": (
        [link(tarfile.SYMTYPE, "../.."), tar_member("folder/link/out", TEXT)],
        SPECIAL,
    ),
    "a hard link out": ([link(tarfile.LNKTYPE, "/etc/passwd")], SPECIAL),
    "a hard link inside": ([link(tarfile.LNKTYPE, GOOD)], SPECIAL),
    "a character device": ([tar_member("folder/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)], SPECIAL),
    "a block device": ([tar_member("folder/disk", type=tarfile.BLKTYPE, devmajor=8)], SPECIAL),
    "a pipe": ([tar_member("folder/pipe", type=tarfile.FIFOTYPE)], SPECIAL),
    "a name twice": ([tar_member(GOOD, b"other\n")], TWICE),
    "a file where a folder is": ([tar_member("folder", TEXT)], BOTH),
    "a folder where a file is": ([tar_member(f"{GOOD}/deeper", TEXT)], BOTH),
    "a name that is not UTF-8": ([tar_member("folder/\udcff\udcfe", TEXT)], NO_NAME),
    "a line feed in a name": ([tar_member("folder/a\nb", TEXT)], NO_NAME),
    "a name of 300 letters": ([tar_member("x" * 300, TEXT)], "cannot be unpacked: .*: File name too long"),
    "zeros": ([tar_member("folder/zeros", bytes(2 * ENOUGH))], LARGE),
}
ZIPS = {
    **{
        f"the name {name!r}": ([(name, TEXT)], LEAVES)
        for name in ("../out", "folder/../../out", "/tmp/out", "..", "a/../../out", "C:/out", "..\\out")
    },
    "a symbolic link": ([zip_entry("folder/link", stat.S_IFLNK | 0o777, b"../../outside")], SPECIAL),
    "a device": ([zip_entry("folder/null", stat.S_IFCHR | 0o666)], SPECIAL),
    "a pipe": ([zip_entry("folder/pipe", stat.S_IFIFO | 0o666)], SPECIAL),
    "a name twice": ([(GOOD, b"other\n")], TWICE),
    "a file where a folder is": ([("folder", TEXT)], BOTH),
    "a folder where a file is": ([(f"{GOOD}/deeper", TEXT)], BOTH),
    "a control character in a name": ([("folder/a\x1b[2J", TEXT)], NO_NAME),
    "zeros": ([("folder/zeros", bytes(2 * ENOUGH))], LARGE),
}
KINDS = {f"tar: {k}": (tar_of, *v) for k, v in TARS.items()} | {f"zip: {k}": (zip_of, *v) for k, v in ZIPS.items()}


def unpack_refused(path, tmp_path, capsys):
    """What `unpack` says; before and after, nothing but its folder differs, and there only the good file may be."""
    inside = tmp_path / "parent" / "data" / "out"
    before = listing(tmp_path)
    with pytest.raises(SystemExit) as ended:
        archives().unpack(path, inside)
    assert ended.value.code == 1
    outside = {name: what for name, what in listing(tmp_path).items() if inside not in (name, *name.parents)}
    for parent in (inside.parent, inside.parent.parent):
        outside.pop(parent, None)
    assert outside == before
    assert all(not found.is_symlink() for found in inside.rglob("*"))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prepare: error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_honest_archive_does_not_have_is_refused(kind, tmp_path, capsys):
    make, members, expected = KINDS[kind]
    path = make(tmp_path / f"a.{'tgz' if make is tar_of else 'zip'}", *members)
    line = unpack_refused(path, tmp_path, capsys)
    assert re.search(rf"^prepare: error: {re.escape(str(path))}: .*{expected}$", line), line


@pytest.mark.parametrize("compress", [gzip, bz2, lzma])
def test_a_single_file_that_grows_too_much_is_refused(compress, tmp_path, capsys):
    suffix = {gzip: "gz", bz2: "bz2", lzma: "xz"}[compress]
    path = tmp_path / f"train.de.{suffix}"
    path.write_bytes(compress.compress(bytes(ENOUGH + 1)))
    assert unpack_refused(path, tmp_path, capsys).endswith(LARGE)


def test_an_archive_that_says_it_is_larger_than_it_is(tmp_path, capsys):
    path = tar_of(tmp_path / "a.tgz")
    member = tarfile.TarInfo("folder/huge")
    member.size = 1 << 50
    content = gzip.decompress(path.read_bytes())[:1024] + member.tobuf() + bytes(2048)
    path.write_bytes(gzip.compress(content))
    assert unpack_refused(path, tmp_path, capsys).endswith(LARGE)
    written = [p for p in (tmp_path / "parent" / "data" / "out").rglob("*") if p.is_file()]
    assert [p.name for p in written] == ["train.txt"]  # it is not even begun


def test_what_is_skipped_counts_too(tmp_path, capsys):
    path = tar_of(tmp_path / "a.tgz", tar_member("folder/zeros", bytes(3 * ENOUGH)))
    with pytest.raises(SystemExit):
        archives().unpack(path, tmp_path / "out", lambda name: name == GOOD)
    assert capsys.readouterr().err.rstrip().endswith(LARGE)


def test_modes_and_owners_are_not_taken_from_the_archive(tmp_path):
    path = tar_of(tmp_path / "a.tgz", tar_member("folder/tool", TEXT, mode=0o6777, uid=12345, gid=12345))
    archives().unpack(path, tmp_path / "out")
    found = (tmp_path / "out" / "folder" / "tool").stat()
    assert stat.S_IMODE(found.st_mode) & 0o7111 == 0
    assert found.st_uid == os.getuid()


@pytest.mark.parametrize("name", ["a.tgz", "a.zip", "text.gz"])
def test_a_folder_where_the_archive_should_be(name, tmp_path, capsys):
    (tmp_path / name).mkdir()
    line = unpack_refused(tmp_path / name, tmp_path, capsys)
    assert line.endswith("Is a directory") and str(tmp_path / name) in line


# ---- every preparation -----------------------------------------------------------------------------------------------

# What each looks for in its archive, and the archive's name.
PREPARATIONS = {
    "wikitext2": ("wikitext-2-v1.zip", "wikitext-2/wiki.train.tokens", []),
    "wikitext103": ("wikitext-103-v1.zip", "wikitext-103/wiki.train.tokens", []),
    "iwslt14_de_en": ("de-en.tgz", "de-en/train.tags.de-en.de", []),
    "lm1b": (
        "1-billion-word-language-modeling-benchmark-r13output.tar.gz",
        "x/training-monolingual.tokenized.shuffled/news.en-00001-of-00100",
        [],
    ),
    "multi30k_de_en": ("train.de.gz", None, []),
    "bert.glue": ("CoLA.zip", "CoLA/train.tsv", ["--tasks", "CoLA", "--from", "model"]),
    "bert.squad": ("train-v1.1.json", None, ["--from", "model"]),
}


def evil(path: Path, wanted, how: str):
    """An archive of this name that is truncated, leads out, has a link, or is HTML."""
    if how == "HTML":
        path.write_text("<html>not found</html>")
    elif wanted is None:
        path.write_bytes(gzip.compress(os.urandom(5000))[:3000])
    elif path.suffix == ".zip":
        extra = {"leads out": ("../../../escaped", TEXT), "link": zip_entry("link", stat.S_IFLNK | 0o777, b"/tmp")}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(wanted, os.urandom(5000))
            if how in extra:
                archive.writestr(*extra[how])
    else:
        extra = {"leads out": tar_member("../../../escaped", TEXT), "link": link(tarfile.SYMTYPE, "/tmp")}
        with tarfile.open(path, "w:gz") as archive:
            for member, content in [tar_member(wanted, os.urandom(5000)), *([extra[how]] if how in extra else [])]:
                archive.addfile(member, io.BytesIO(content))
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def tiny_model(folder: Path):
    """What glue and squad take for a pre-trained BERT until it is trained."""
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##a", "##b"]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in words[5:]))
    (folder / "model.pt").write_bytes(b"weights")


HOW = ("leads out", "link", "truncated", "HTML")
ALL = [(example, how) for example in PREPARATIONS for how in HOW]
QUICK = [(example, HOW[i % len(HOW)]) for i, example in enumerate(PREPARATIONS)]


@pytest.mark.parametrize(
    "example, how", [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in ALL]
)
def test_every_preparation_refuses_and_keeps_what_it_made_before(example, how, tmp_path):
    name, wanted, flags = PREPARATIONS[example]
    given, data = tmp_path / "given", tmp_path / "here" / "data"
    given.mkdir()
    (data / "earlier").mkdir(parents=True)
    (data / "earlier" / "result").write_text("good")
    tiny_model(tmp_path / "model")
    evil(given / name, wanted, how)
    before = listing(tmp_path)
    environment = {"ARCHIVES": str(given), "DATA": str(data), "MIRROR": "http://127.0.0.1:9/"}
    line = refusal(
        f"-m {example}.prepare", "--any-counts", "--workers", "1", *flags,
        path=[EXAMPLES], environment=environment, cwd=tmp_path,
    )  # fmt: skip
    assert line.startswith("prepare: error: ")
    assert name in line
    after = {path: what for path, what in listing(tmp_path).items() if what is not None or path in before}
    model = {path for path in after if data / "bert" in path.parents}  # copied before the text is looked at
    assert {path: what for path, what in after.items() if path not in model} == before


ARCHIVE_SUM = "0" * 64


@pytest.mark.parametrize("kind", ["another sum", "a folder"])
def test_what_was_fetched_into_data(kind, tmp_path, capsys):
    found = archives()
    path = tmp_path / "archives" / "a.zip"
    path.parent.mkdir()
    path.mkdir() if kind == "a folder" else zip_of(path)
    with pytest.raises(SystemExit):
        found.obtain(found.Archive("a.zip", ("http://127.0.0.1:9/a.zip",), ARCHIVE_SUM), tmp_path)
    said = capsys.readouterr().err
    assert said.count("prepare: error: ") == 1 and "a.zip" in said
    assert (f"must be {ARCHIVE_SUM}" in said) == (kind == "another sum")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["tgz", "zip", "tar.bz2", "tar.xz"])
def test_damage_anywhere_is_noticed_or_harmless(suffix, tmp_path, capsys):
    """A hundred archives of each kind with a few bytes changed: refused, or the same files."""
    import random

    dice = random.Random(0)
    content = {f"folder/{i}": dice.randbytes(3000) for i in range(5)}
    path = tmp_path / f"a.{suffix}"
    if suffix == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    else:
        mode = {"tgz": "w:gz", "tar.bz2": "w:bz2", "tar.xz": "w:xz"}[suffix]
        with tarfile.open(path, mode) as archive:
            for name, data in content.items():
                member, _ = tar_member(name, data)
                archive.addfile(member, io.BytesIO(data))
    whole = path.read_bytes()
    refused = 0
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged)
        out = tmp_path / "out"
        try:
            archives().unpack(path, out)
        except SystemExit as ended:
            assert ended.code == 1
            refused += 1
        else:
            found = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
            assert set(found.values()) == set(content.values())
        archives().remove(out)
        assert capsys.readouterr().err.count("prepare: error: ") <= 1
    assert refused > 50
