"""Archives made and read by other programs: Python's tarfile and zipfile, GNU tar, Info-ZIP, Go,
and by Forebay's own parsers.

Every program describes an archive in the same form, a list of `Member`s, so that the lists can be
compared.
"""

from __future__ import annotations

import calendar
import dataclasses
import json
import os
import random
import shutil
import stat
import subprocess
import tarfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
VOLUME = b"a volume"


@dataclasses.dataclass(frozen=True)
class Member:
    """`kind`: file, dir, symlink, hardlink, device, sparse, special, other (a zip's method or
    encryption). `data`: of what can be read.
    """

    name: bytes
    kind: str
    mtime: int
    data: bytes | None
    # From Forebay: the number of the member that a look-up of this name finds.
    found: int | None = None

    @property
    def shown(self) -> str:
        """The name as Forebay gives it: bytes that are not UTF-8 become U+FFFD; slashes at the end
        of directories do not count.
        """
        name = self.name.decode("utf-8", "replace")
        # "special": such as the directories of GNU tar's incremental archives.
        return (name.rstrip("/") or "/") if self.kind in ("dir", "special") else name


def run(command: list, **options) -> bytes:
    done = subprocess.run(command, capture_output=True, env=ENV, **options)
    assert done.returncode == 0, f"{command}: {done.stderr.decode(errors='replace')}"
    return done.stdout


class Programs:
    """The helper programs that are built from this repository."""

    def __init__(self, directory: Path) -> None:
        self.go = directory / "archives-go"
        run(["go", "build", "-o", str(self.go), "."], cwd=ROOT / "tests/archives")
        built = run(
            [
                "cargo",
                "build",
                "--release",
                "--locked",
                "-q",
                "--example",
                "members",
                "--message-format=json",
            ],
            cwd=ROOT,
        )
        (self.members,) = [
            m["executable"]
            for m in map(json.loads, built.splitlines())
            if m.get("target", {}).get("name") == "members"
        ]

    def forebay(self, paths: list[Path]) -> dict[Path, list[Member] | str]:
        kinds = {
            "Stored": "file",
            "Deflated": "file",
            "Directory": "dir",
            "SymbolicLink": "symlink",
            "HardLink": "hardlink",
            "Device": "device",
        }
        kinds |= {
            "Sparse": "sparse",
            "Special": "special",
            "Encrypted": "other",
            "OtherMethod": "other",
        }

        def member(words: list[bytes]) -> Member:
            name, storage, _, _, mtime, found, data = words
            assert not data.startswith(b"!"), f"{unhex(name)}: {unhex(data[1:])}"
            return Member(
                unhex(name),
                kinds[storage.decode()],
                int(mtime),
                None if data == b"-" else unhex(data),
                int(found),
            )

        return parse(run([self.members, "list", *map(str, paths)]), member)

    def go_tells(self, paths: list[Path]) -> dict[Path, list[Member] | str]:
        def member(words: list[bytes]) -> Member:
            name, kind, mtime, data = words
            return Member(
                unhex(name), kind.decode(), int(mtime), None if data == b"-" else unhex(data)
            )

        told = parse(run([str(self.go), "tell", *map(str, paths)]), member)
        # Go leaves names of zips as bytes.
        zips = {
            p: [dataclasses.replace(m, name=zip_name(m.name)) for m in t]
            for p, t in told.items()
            if p.suffix == ".zip" and isinstance(t, list)
        }
        return told | zips

    def go_makes(
        self, form: str, path: Path, members: list[Member], links: dict[bytes, bytes]
    ) -> None:
        lines = [
            b"%b %s %d %b %b\n"
            % (
                hexed(m.name),
                m.kind.encode(),
                m.mtime,
                hexed(m.data or b""),
                hexed(links.get(m.name, b"")),
            )
            for m in members
        ]
        run([str(self.go), "make", form, str(path)], input=b"".join(lines))

    def forebay_writes(self, kind: str, path: Path, members: list[Member]) -> None:
        lines = [b"%b %d %b\n" % (hexed(m.name), m.mtime, hexed(m.data)) for m in members]
        path.write_bytes(run([self.members, "write", kind], input=b"".join(lines)))


def hexed(data: bytes) -> bytes:
    return data.hex().encode()


def unhex(text: bytes) -> bytes:
    return bytes.fromhex(text.decode())


def parse(told: bytes, member) -> dict[Path, list[Member] | str]:
    """Members by archive; a message if the archive was refused."""
    archives: dict[Path, list[Member] | str] = {}
    current: list[Member] = []
    for line in told.splitlines():
        words = line.split(b" ")
        if words[0] == b"archive":
            current = archives[Path(os.fsdecode(unhex(words[1])))] = (
                [] if words[2] != b"error" else unhex(words[3]).decode()
            )
        else:
            current.append(member(words))
    return archives


def python_tells(path: Path) -> list[Member]:
    if path.suffix == ".zip":
        return zipfile_tells(path)

    def kind(m: tarfile.TarInfo) -> str:
        if m.issparse():
            return "sparse"
        known = [
            ("file", m.isreg()),
            ("dir", m.isdir()),
            ("symlink", m.issym()),
            ("hardlink", m.islnk()),
            ("device", m.isdev()),
        ]
        return next((name for name, holds in known if holds), "special")

    with tarfile.open(path, encoding="utf-8", errors="surrogateescape") as t:
        return [
            Member(
                m.name.encode("utf-8", "surrogateescape"),
                kind(m),
                int(m.mtime // 1),
                t.extractfile(m).read() if m.isreg() else None,
            )
            for m in t.getmembers()
        ]


def zip_name(raw: bytes) -> bytes:
    """A name that is not marked as UTF-8, as Forebay takes it: UTF-8 if it is that, code page 437
    otherwise.
    """
    try:
        return raw.decode().encode()
    except UnicodeDecodeError:
        return raw.decode("cp437").encode()


def zipfile_tells(path: Path) -> list[Member]:
    def member(z: zipfile.ZipFile, m: zipfile.ZipInfo) -> Member:
        mode = m.external_attr >> 16 if m.create_system == 3 else 0
        kind = (
            "dir"
            if m.is_dir() or stat.S_ISDIR(mode)
            else "symlink"
            if stat.S_ISLNK(mode)
            else "device"
            if stat.S_ISFIFO(mode)
            else "file"
        )
        if kind == "file" and (
            m.flag_bits & 1 or m.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        ):
            kind = "other"
        # zipfile takes every unmarked name for code page 437.
        name = m.filename.encode() if m.flag_bits & 0x800 else zip_name(m.filename.encode("cp437"))
        return Member(
            name,
            kind,
            calendar.timegm((*m.date_time, 0, 0, 0)),
            z.read(m) if kind == "file" else None,
        )

    with zipfile.ZipFile(path) as z:
        return [member(z, m) for m in z.infolist()]


def gnu_tar_tells(path: Path) -> tuple[list[Member], bytes]:
    """Names, kinds and times of all members, without data; and the data of all files together."""
    flags = ["-P", "--quoting-style=escape", "--full-time", "--numeric-owner", "-f", str(path)]
    names = run(["tar", "-t", *flags]).splitlines()
    lines = run(["tar", "-tv", *flags]).splitlines()
    kinds = {
        "-": "file",
        "d": "dir",
        "l": "symlink",
        "h": "hardlink",
        "c": "device",
        "b": "device",
        "p": "device",
        "C": "file",
    }
    members = []
    for name, line in zip(names, lines, strict=True):
        # mode, owner, size (or device numbers), date, time.
        date, time = line.split()[3:5]
        when = datetime.fromisoformat(f"{date.decode()} {time.decode()[:8]}").replace(tzinfo=UTC)
        members.append(
            Member(unescape(name), kinds.get(chr(line[0]), "special"), int(when.timestamp()), None)
        )
    return members, run(["tar", "-xO", "-P", "-f", str(path)])


def unescape(name: bytes) -> bytes:
    out, i = bytearray(), 0
    while i < len(name):
        if name[i : i + 1] != b"\\":
            out.append(name[i])
            i += 1
        elif name[i + 1 : i + 2].isdigit():
            out.append(int(name[i + 1 : i + 4], 8))
            i += 4
        else:
            out += {
                b"n": b"\n",
                b"t": b"\t",
                b"\\": b"\\",
                b"r": b"\r",
                b"b": b"\b",
                b"f": b"\f",
                b"a": b"\a",
                b"v": b"\v",
            }[name[i + 1 : i + 2]]
            i += 2
    return bytes(out)


class Tree:
    """A random directory of files, links, devices and odd names, for the programs that pack what is
    on a disk.
    """

    def __init__(self, rng: random.Random, root: Path) -> None:
        self.root = root
        root.mkdir()
        base = os.fsencode(root)
        for relative in self.names(rng):
            path = base + b"/" + relative
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                if os.path.lexists(path):
                    continue
                match rng.choice(
                    ["file"] * 7 + ["dir", "symlink", "hardlink", "fifo", "device", "sparse"]
                ):
                    case "dir":
                        os.mkdir(path)
                    case "symlink":
                        os.symlink(
                            rng.choice(
                                [
                                    b"a",
                                    b"l" * 99,
                                    b"l" * 100,
                                    b"l" * 101,
                                    b"t/" * 140 + b"x",
                                    b"/abs",
                                    b"..",
                                    "ü".encode(),
                                ]
                            ),
                            path,
                        )
                    case "hardlink":
                        files = [p for p in self.files() if p != path]
                        os.link(rng.choice(files), path) if files else os.mkfifo(path)
                    case "fifo":
                        os.mkfifo(path)
                    case "device":
                        self.device(path)
                    case "sparse":
                        self.sparse(rng, path)
                    case _:
                        Path(os.fsdecode(path)).write_bytes(content(rng))
                if not os.path.islink(path):
                    when = rng.choice(
                        [0, 1, 1_700_000_000, 1_700_000_000.75, 2**31, 2**32 + 7, 8**11 - 1, -5]
                    )
                    os.utime(path, (when, when))
            except (NotADirectoryError, FileExistsError):
                # A part of the name is already a file.
                continue

    @staticmethod
    def device(path: bytes) -> None:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            # Only root can make devices.
            os.mkfifo(path)

    @staticmethod
    def sparse(rng: random.Random, path: bytes) -> None:
        """Islands in a sea of zeros; now and then more of them than one header can list."""
        with open(path, "wb") as f:
            for i in range(rng.choice([1, 3, 30])):
                f.seek(i << 17)
                f.write(b"island")
            f.truncate(f.tell() + rng.choice([0, 1 << 17]))

    def files(self) -> list[bytes]:
        found = [
            os.path.join(d, f) for d, _, files in os.walk(os.fsencode(self.root)) for f in files
        ]
        return sorted(p for p in found if stat.S_ISREG(os.lstat(p).st_mode))

    @staticmethod
    def names(rng: random.Random) -> list[bytes]:
        exact = [b"n" * n for n in (99, 100, 101, 155, 156, 255)]
        split = [
            b"p" * 155 + b"/" + b"n" * 100,
            b"p" * 156 + b"/" + b"n" * 100,
            b"p" * 155 + b"/" + b"n" * 101,
            b"q" * 131 + b"/" + b"n" * 100,
        ]
        odd = [
            b"with space",
            b"new\nline",
            b"tab\t",
            b"back\\slash",
            b"-dash",
            b"*",
            b" lead",
            b"trail ",
            b"\xff\xfe",
            b"lat\xefn",
            "日本/ü".encode(),
        ]
        odd += [
            b"e\xcc\x81",
            b".hidden",
            b"a",
            b"d/a",
            b"=eq=",
            b"%41",
            "😀".encode() * 20,
            b"x" * 99 + "ü".encode(),
            b"\xc3\x28" * 60,
        ]
        deep = [b"deep/" * n + b"x" for n in (18, 19, 20, 30, 50, 51, 120)]
        made = [b"r%d/%d" % (rng.randrange(5), i) for i in range(rng.randrange(1, 20))]
        return rng.sample(exact + split + odd + deep, rng.randrange(3, 20)) + made

    def packed_by_gnu_tar(self, rng: random.Random, path: Path, form: str) -> None:
        """A format that cannot store a name leaves it out and says so by its status."""
        flags = [f"--format={form}", "--sort=name"]
        sparse = form in ("gnu", "oldgnu", "pax", "posix") and rng.random() < 0.5
        if sparse:
            flags += rng.choice(
                [
                    ["--sparse"],
                    ["--sparse", "--sparse-version=0.0"],
                    ["--sparse", "--sparse-version=0.1"],
                    ["--sparse", "--sparse-version=1.0"],
                ]
            )
        # The formats that can express it.
        if form in ("gnu", "pax") and rng.random() < 0.5:
            flags += ["--owner=someone:3000000", "--group=others:4000000"]
        if rng.random() < 0.3:
            flags += [f"--blocking-factor={rng.choice([1, 3, 20])}"]
        if form in ("gnu", "oldgnu", "pax") and rng.random() < 0.3:
            flags += [f"--label={VOLUME.decode()}"]
        if form == "gnu" and rng.random() < 0.2:
            flags += ["--incremental"]
        names = ["."] if rng.random() < 0.5 else sorted(os.listdir(self.root))
        done = subprocess.run(
            ["tar", "-c", *flags, "-f", str(path), "--", *names],
            cwd=self.root,
            env=ENV,
            capture_output=True,
        )
        assert done.returncode in (0, 2) and path.stat().st_size >= 512, (
            f"{flags}: {done.stderr.decode(errors='replace')}"
        )

    def packed_by_info_zip(self, rng: random.Random, path: Path) -> None:
        flags = ["-q", "-y", *rng.sample(["-0", "-9", "-X", "-D", "-fd", "-fz"], 2)]
        # Its input is regular files and links: it would wait for a FIFO.
        (self.root / "plain").write_bytes(b"always there")
        names = [os.path.relpath(p, os.fsencode(self.root)) for p in self.files()]
        names = [
            n
            for n in names
            if b"\n" not in n
            and not n.startswith(b"-")
            and b"*" not in n
            and b"\\" not in n
            and n.strip() == n
        ]
        run(["zip", *flags, str(path), "-@"], cwd=self.root, input=b"\n".join(names) + b"\n")
        if (
            "-fz" in flags
            and subprocess.run(["unzip", "-tq", str(path)], capture_output=True).returncode != 0
        ):
            # Forced to zip64, `zip` sometimes leaves out the zip64 end record, and no program can
            # read that.
            path.unlink()
            flags.remove("-fz")
            run(["zip", *flags, str(path), "-@"], cwd=self.root, input=b"\n".join(names) + b"\n")


def content(rng: random.Random) -> bytes:
    size = rng.choice([0, 0, 1, 100, 511, 512, 513, 1024, 5000, 30_000])
    return rng.choice([rng.randbytes(size), (b"forebay " * (size // 8 + 1))[:size], bytes(size)])


def info_zip() -> bool:
    return shutil.which("zip") is not None and shutil.which("unzip") is not None
