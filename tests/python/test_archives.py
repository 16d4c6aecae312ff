"""Archives agree with the world: what Forebay finds in an archive is what tarfile, zipfile, GNU
tar, Go and Info-ZIP find, and what it writes they read.

Random trees and lists of members, packed by each program in each of its formats.
`FOREBAY_TEST_CASES` multiplies their number; `FOREBAY_TEST_SEED` replays a run.
"""

from __future__ import annotations

import io
import os
import random
import re
import struct
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from archives import (
    ENV,
    VOLUME,
    Member,
    Programs,
    Tree,
    content,
    gnu_tar_tells,
    info_zip,
    python_tells,
    run,
    zipfile_tells,
)

CASES = float(os.environ.get("FOREBAY_TEST_CASES", 1))
GNU_FORMATS = ["v7", "oldgnu", "gnu", "ustar", "posix", "pax"]
PYTHON_FORMATS = {
    "ustar": tarfile.USTAR_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
}
# Repeated names are tested too.
pytestmark = pytest.mark.filterwarnings("ignore:Duplicate name")


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Programs:
    return Programs(tmp_path_factory.mktemp("programs"))


@pytest.fixture
def rng(request) -> random.Random:
    seed = int(os.environ.get("FOREBAY_TEST_SEED") or time.time_ns())
    print(f"replay with FOREBAY_TEST_SEED={seed}")
    return random.Random(f"{seed} {request.node.name}")


def cases(quick: int) -> range:
    return range(max(1, round(quick * CASES)))


def same_key(name: str) -> str:
    """What a look-up compares: without leading `./` and trailing `/`."""
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    return name.rstrip("/") or name


def check(
    path: Path,
    ours: list[Member] | str,
    theirs: list[Member] | str,
    who: str,
    *,
    mtime=True,
    data=True,
) -> None:
    assert isinstance(theirs, list), f"{path.name}: {who} refuses it: {theirs}"
    assert isinstance(ours, list), f"{path.name}: refused here, read by {who}: {ours}"
    assert len(ours) == len(theirs), f"{path.name}: {who}"
    for o, t in zip(ours, theirs, strict=True):
        # tarfile takes the name that GNU tar gives to the packed form of a sparse file with a long
        # name, and times of access and change.
        odd = (o.kind == "sparse" and b"GNUSparseFile." in t.name) or re.fullmatch(
            "(\ufffd{12})?[0-7]{11}/", t.shown.removesuffix(o.shown)
        )
        known = who == "tarfile" and odd
        assert o.shown == t.shown or known, f"{path.name}: {o.shown!r} is {t.shown!r} for {who}"
        # What reads a sparse file calls it a file; GNU tar alone knows that its own type of
        # directory is one.
        assert o.kind == t.kind or (o.kind, t.kind) in (("sparse", "file"), ("special", "dir")), (
            f"{path.name}: {o.shown!r} is {o.kind} here, {t.kind} for {who}"
        )
        # GNU tar rounds times before 1970 up, all others down; Go has no times before 1970 in zips.
        odd = {
            "GNU tar": t.mtime - 1,
            "Go": t.mtime - 2**32 if path.suffix == ".zip" else t.mtime,
        }.get(who)
        same_time = o.mtime == t.mtime or (o.mtime < 0 and o.mtime == odd)
        assert not mtime or same_time, (
            f"{path.name}: the time of {o.shown!r}, {o.mtime}, is {t.mtime} for {who}"
        )
        if data and o.kind == "file":
            assert o.data == t.data, f"{path.name}: the bytes of {o.shown!r}, {who}"


def check_look_ups(ours: list[Member]) -> None:
    """Of a repeated name, the last member is found, where nothing else is asked for."""
    last = {same_key(m.name.decode()): n for n, m in enumerate(ours)}
    for m in ours:
        assert m.found == last[same_key(m.name.decode())], m.name


def check_tars(programs: Programs, paths: list[Path]) -> None:
    ours, go = programs.forebay(paths), programs.go_tells(paths)
    for path in paths:
        python = python_tells(path)
        check(path, ours[path], python, "tarfile")
        check_look_ups(ours[path])
        check(path, ours[path], go[path], "Go")
        listed, files = gnu_tar_tells(path)
        if listed and ours[path] and listed[0].name == VOLUME != ours[path][0].name:
            # In a PAX archive the name of the volume is in a global header, which GNU tar lists
            # like a member.
            listed = listed[1:]
        check(path, ours[path], listed, "GNU tar", data=False)
        # GNU tar expands sparse files; tarfile, which does too, says to what.
        expanded = b"".join(
            o.data if o.kind == "file" else p.data
            for o, p in zip(ours[path], python, strict=True)
            if o.kind in ("file", "sparse")
        )
        assert files == expanded, f"{path.name}: the bytes of its files, GNU tar"


def compressed(path: Path, rng: random.Random) -> Path:
    """The same tar, or a compressed form of it made by gzip or lz4."""
    if rng.random() < 0.3:
        target = path.with_suffix(".tar.gz")
        target.write_bytes(run(["gzip", "-c", str(path)]))
        return target
    return path


def test_tars_of_gnu_tar(programs, rng, tmp_path):
    paths = []
    for case in cases(2):
        tree = Tree(rng, tmp_path / f"tree{case}")
        for form in GNU_FORMATS:
            path = tmp_path / f"{case}-{form}.tar"
            tree.packed_by_gnu_tar(rng, path, form)
            paths.append(compressed(path, rng))
    check_tars(programs, paths)


def members(rng: random.Random, *, zip: bool = False) -> tuple[list[Member], dict[bytes, bytes]]:
    """A random list of members, repeated, absolute and climbing names among them; and the targets
    of links.
    """
    out, links = [], {}
    names = [n for n in Tree.names(rng) if b"\\" not in n or not zip]
    for name in names:
        if zip:
            name = name.decode("utf-8", "replace").encode()
        kind = rng.choice(
            ["file"] * 6 + ([] if zip else ["symlink", "hardlink", "device"]) + ["dir"]
        )
        name = (
            rng.choice([b"", b"", b"", b"./", b"/", b"../", b".//"])
            + name
            + (b"/" if kind == "dir" else b"")
        )
        if out and rng.random() < 0.15:
            again = rng.choice(out)
            name, kind = again.name, again.kind
        when = rng.choice(
            [0, 1, 1_700_000_000, 2**31, 8**11 - 1]
            if not zip
            else [1_000_000_000, 1_700_000_002, 4_000_000_000]
        )
        if kind in ("symlink", "hardlink"):
            links[name] = rng.choice([b"a", b"l" * 99, b"l" * 100, "ü".encode()])
        out.append(Member(name, kind, when, content(rng) if kind == "file" else None))
    return out, links


def test_tars_of_go(programs, rng, tmp_path):
    paths = []
    for case in cases(3):
        listed, links = members(rng)
        for form in ("ustar", "gnu", "pax"):
            path = tmp_path / f"{case}-{form}.tar"
            programs.go_makes(form, path, listed, links)
            paths.append(compressed(path, rng))
    check_tars(programs, paths)


def packed_by_tarfile(rng: random.Random, path: Path, form: str) -> None:
    kinds = {
        "file": tarfile.REGTYPE,
        "dir": tarfile.DIRTYPE,
        "symlink": tarfile.SYMTYPE,
        "hardlink": tarfile.LNKTYPE,
        "device": tarfile.FIFOTYPE,
    }
    listed, links = members(rng)
    headers = (
        {"comment": "ü" * rng.choice([1, 600])} if form == "pax" and rng.random() < 0.5 else None
    )
    with tarfile.open(
        path,
        "w",
        format=PYTHON_FORMATS[form],
        encoding="utf-8",
        errors="surrogateescape",
        pax_headers=headers,
    ) as t:
        for m in listed:
            info = tarfile.TarInfo(m.name.decode("utf-8", "surrogateescape"))
            info.type, info.mtime, info.size = kinds[m.kind], m.mtime, len(m.data or b"")
            info.linkname = links.get(m.name, b"").decode()
            if form == "pax":
                info.mtime = rng.choice([m.mtime, m.mtime + 0.5, -1.25, 10**11])
                info.pax_headers = rng.choice(
                    [{}, {"comment": "of this member"}, {"SCHILY.xattr.user.x": "a=b\nc"}]
                )
            if form == "gnu":
                info.mtime = rng.choice([m.mtime, -7, 10**11])
            if form != "ustar":
                info.uid = rng.choice([0, 8**7, 2**31])
            try:
                t.addfile(info, io.BytesIO(m.data or b""))
            except ValueError:
                # A name or link that ustar cannot store.
                continue


def test_tars_of_tarfile(programs, rng, tmp_path):
    paths = []
    for case in cases(4):
        for form in PYTHON_FORMATS:
            path = tmp_path / f"{case}-{form}.tar"
            packed_by_tarfile(rng, path, form)
            paths.append(compressed(path, rng))
    check_tars(programs, paths)


def with_header(archive: bytes, at: int, field: int, value: bytes) -> bytes:
    """The tar with bytes of one header changed and its checksum adjusted."""
    h = bytearray(archive[at : at + 512])
    h[field : field + len(value)] = value
    h[148:156] = b" " * 8
    h[148:156] = b"%06o\0 " % sum(h)
    return archive[:at] + bytes(h) + archive[at + 512 :]


def test_numbers_in_base_256_are_read_as_others_read_them(programs, rng, tmp_path):
    paths = []
    for case in range(8):
        path, data = tmp_path / f"{case}.tar", content(rng)
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as t:
            for name, body in (("first", data), ("second", b"after")):
                info = tarfile.TarInfo(name)
                info.size = len(body)
                t.addfile(info, io.BytesIO(body))
        archive = with_header(path.read_bytes(), 0, 124, b"\x80" + len(data).to_bytes(11, "big"))
        when = rng.choice([-3, 0, 2**34, 1_700_000_000])
        archive = with_header(
            archive,
            0,
            136,
            bytes([0xFF if when < 0 else 0x80]) + (when % (1 << 88)).to_bytes(11, "big"),
        )
        path.write_bytes(archive)
        paths.append(path)
    check_tars(programs, paths)


def test_other_programs_read_the_last_of_a_repeated_name(programs, tmp_path):
    """As `repeated_members = "last"` does: `tar -x` leaves it, `getmember` gives it, and zipfile's
    `read` does the same.
    """
    path, zipped = tmp_path / "twice.tar", tmp_path / "twice.zip"
    bodies = [("a", b"first"), ("b", b"other"), ("./a", b"second"), ("a", b"third and last")]
    with tarfile.open(path, "w") as t, zipfile.ZipFile(zipped, "w") as z:
        for name, body in bodies:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            t.addfile(info, io.BytesIO(body))
            z.writestr(name, body)
    for archive, ours in programs.forebay([path, zipped]).items():
        assert [ours[m.found].data for m in ours] == [
            b"third and last",
            b"other",
            b"third and last",
            b"third and last",
        ], archive
    run(["tar", "-xf", str(path)], cwd=tmp_path)
    assert (tmp_path / "a").read_bytes() == b"third and last"
    with tarfile.open(path) as t, zipfile.ZipFile(zipped) as z:
        assert t.extractfile("a").read() == z.read("a") == b"third and last"


def test_where_the_programs_disagree_nothing_is_passed_over(programs, tmp_path):
    """A damaged tar ends without a word for tarfile, with a warning or an error for others. Here it
    is an error.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as t:
        for name in ("a", "b"):
            t.addfile(tarfile.TarInfo(name))
    a, b = raw.getvalue()[:512], raw.getvalue()[512:1024]
    zero = bytes(512)
    odd = {
        # One block of zeros before a member: tarfile and GNU tar stop there, Go refuses.
        "lone-zeros": (a + zero + b + zero * 2, None, "single block of zeros"),
        # A damaged header: tarfile stops there.
        "damaged": (a + b[:20] + b"x" + b[21:] + zero * 2, None, "checksum"),
        # What follows the end belongs to nobody.
        "after-the-end": (a + zero * 2 + b + zero * 2, ["a"], None),
        "no-end": (a + b, ["a", "b"], None),
        "one-block-at-the-end": (a + zero, ["a"], None),
        "nothing": (zero * 2, [], None),
    }
    paths = {}
    for name, (archive, _, _) in odd.items():
        paths[name] = tmp_path / f"{name}.tar"
        paths[name].write_bytes(archive)
    ours, go = programs.forebay(list(paths.values())), programs.go_tells(list(paths.values()))
    for name, (_, names, refusal) in odd.items():
        mine = ours[paths[name]]
        if refusal:
            assert isinstance(mine, str) and refusal in mine, name
            assert [m.name for m in python_tells(paths[name])] == [b"a"], name
        else:
            assert (
                [m.shown for m in mine]
                == [m.shown for m in go[paths[name]]]
                == [m.shown for m in python_tells(paths[name])]
                == names
            ), name


class Pipe(io.RawIOBase):
    """Cannot seek, so that zipfile streams: sizes and checksums follow the data."""

    def __init__(self, file) -> None:
        self.file = file

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        return self.file.write(data)


def packed_by_zipfile(rng: random.Random, path: Path) -> None:
    with path.open("wb") as f:
        f.write(rng.choice([b"", b"", b"#!/bin/sh\nexit\n" * 9]))
        with zipfile.ZipFile(rng.choice([f, Pipe(f)]), "w", strict_timestamps=False) as z:
            for m in members(rng, zip=True)[0]:
                info = zipfile.ZipInfo(
                    m.name.decode(),
                    (
                        rng.randrange(1980, 2107),
                        rng.randrange(1, 13),
                        rng.randrange(1, 29),
                        23,
                        59,
                        58,
                    ),
                )
                info.compress_type = rng.choice(
                    [
                        zipfile.ZIP_STORED,
                        zipfile.ZIP_DEFLATED,
                        zipfile.ZIP_DEFLATED,
                        zipfile.ZIP_BZIP2,
                    ]
                )
                info.extra = rng.choice(
                    [b"", struct.pack("<HH4s", 0xCAFE, 4, b"data"), struct.pack("<HH", 0xBEEF, 0)]
                )
                info.comment = rng.choice([b"", b"of the member", "ü".encode()])
                info.create_system = rng.choice([0, 3])
                info.external_attr = (0o100644 << 16) if info.create_system == 3 else 0
                if m.kind == "file":
                    with z.open(info, "w", force_zip64=rng.random() < 0.3) as out:
                        out.write(m.data)
                else:
                    z.writestr(info, b"")
            z.comment = rng.choice([b"", b"a comment", rng.randbytes(65535)])


def check_zips(programs: Programs, paths: list[Path], *, mtime: bool) -> None:
    ours, go = programs.forebay(paths), programs.go_tells(paths)
    for path in paths:
        check(path, ours[path], zipfile_tells(path), "zipfile", mtime=mtime)
        check_look_ups(ours[path])
        readable = all(m.kind != "other" for m in ours[path])
        # Go refuses an archive because of one method that it does not know.
        if readable:
            check(path, ours[path], go[path], "Go")
        if info_zip() and readable and ours[path]:
            # 1: a warning, for example about bytes before the archive.
            done = subprocess.run(["unzip", "-p", str(path)], capture_output=True, env=ENV)
            links = [m for m in ours[path] if m.kind == "symlink"]
            assert done.returncode in (0, 1), f"{path.name}: {done.stderr}"
            assert links or done.stdout == b"".join(
                m.data for m in ours[path] if m.kind == "file"
            ), f"{path.name}: bytes, Info-ZIP"


def test_zips_of_zipfile(programs, rng, tmp_path):
    paths = [tmp_path / f"{case}.zip" for case in cases(12)]
    for path in paths:
        packed_by_zipfile(rng, path)
    check_zips(programs, paths, mtime=True)


def test_zips_of_go(programs, rng, tmp_path):
    paths = []
    for case in cases(4):
        listed, _ = members(rng, zip=True)
        for form in ("zip", "zip-stored"):
            paths.append(tmp_path / f"{case}-{form}.zip")
            programs.go_makes(form, paths[-1], listed, {})
    check_zips(programs, paths, mtime=False)


def test_zips_of_info_zip(programs, rng, tmp_path):
    """Or of zipfile once more, where Info-ZIP is not installed."""
    paths = []
    for case in cases(4):
        paths.append(tmp_path / f"{case}.zip")
        if info_zip():
            Tree(rng, tmp_path / f"tree{case}").packed_by_info_zip(rng, paths[-1])
        else:
            packed_by_zipfile(rng, paths[-1])
    check_zips(programs, paths, mtime=not info_zip())


def test_names_of_zips_that_are_not_marked_as_utf_8(programs, tmp_path):
    """Unix programs write UTF-8 without saying so, DOS ones code page 437. What is UTF-8 is taken
    for it; zipfile never does, unzip always.
    """
    path = tmp_path / "names.zip"
    names = {
        b"plain": "plain",
        "größe/日本".encode(): "größe/日本",
        b"caf\x82": "café",
        b"\x9b\xffx": "¢\xa0x",
        bytes(range(0x80, 0x100)): None,
    }
    with zipfile.ZipFile(path, "w") as z:
        for i, raw in enumerate(names):
            z.writestr(chr(ord("A") + i) * len(raw), b"%d" % i)
    archive = path.read_bytes()
    for i, raw in enumerate(names):
        archive = archive.replace(bytes([ord("A") + i]) * len(raw), raw)
    path.write_bytes(archive)
    (ours,) = programs.forebay([path]).values()
    assert [m.data for m in ours] == [b"%d" % i for i in range(len(names))]
    for m, (raw, expected) in zip(ours, names.items(), strict=True):
        assert m.name.decode() == (expected or raw.decode("cp437")), raw
        assert expected == "größe/日本" or m.name.decode() == raw.decode("cp437")


def writable(rng: random.Random) -> list[Member]:
    """What Forebay writes: files, of any name that is UTF-8 and does not end in a slash."""
    listed = [m for m in members(rng, zip=True)[0] if m.kind == "file" and b"\n" not in m.name]
    large = Member(b"large", "file", 1_700_000_000, rng.randbytes(700_000) + bytes(700_000))
    return [*listed, *rng.choice([[], [large]])]


def test_what_is_written_here_is_read_everywhere(programs, rng, tmp_path):
    for case in cases(2):
        listed = writable(rng)
        tars = {kind: tmp_path / f"{case}{kind}" for kind in (".tar", ".tgz", ".tar.lz4")}
        zipped = tmp_path / f"{case}.zip"
        for kind, path in {**tars, ".zip": zipped}.items():
            programs.forebay_writes(kind, path, listed)
        # A program that is not ours undoes lz4.
        plain = tmp_path / f"{case}-unlz4.tar"
        plain.write_bytes(unlz4(tars[".tar.lz4"].read_bytes()))
        paths = [tars[".tar"], tars[".tgz"], plain]
        (gz := tmp_path / f"{case}.tar.gz").write_bytes(tars[".tgz"].read_bytes())
        check_tars(programs, [tars[".tar"], gz, plain])
        for path in [*paths, tars[".tar.lz4"], zipped]:
            check(
                path,
                programs.forebay([path])[path],
                listed,
                "what was written",
                mtime=path != zipped,
            )
        check_zips(programs, [zipped], mtime=True)


def unlz4(frame: bytes) -> bytes:
    import pyarrow

    with pyarrow.input_stream(io.BytesIO(frame), compression="lz4") as stream:
        return stream.read()


def test_tars_compressed_by_another_lz4(programs, rng, tmp_path):
    import pyarrow

    for case in cases(3):
        tar, path = tmp_path / f"{case}.tar", tmp_path / f"{case}.tar.lz4"
        packed_by_tarfile(rng, tar, rng.choice(list(PYTHON_FORMATS)))
        with pyarrow.output_stream(str(path), compression="lz4") as out:
            out.write(tar.read_bytes())
        check(path, programs.forebay([path])[path], python_tells(tar), "tarfile")
