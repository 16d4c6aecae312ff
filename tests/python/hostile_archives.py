"""Archives that are not what they say, byte by byte: Python's tarfile and zipfile would not write
them.

Each is named in tests/hostile/archives.toml.
"""

from __future__ import annotations

import gzip
import io
import struct
import zipfile

BLOCK = 512


def header(
    name: bytes,
    size: int = 0,
    kind: bytes = b"0",
    *,
    link: bytes = b"",
    size_field: bytes | None = None,
    checksum: int | None = None,
) -> bytes:
    """A ustar header; `size_field` and `checksum` instead of the right ones."""
    field = size_field if size_field is not None else b"%011o\0" % size
    block = bytearray(
        name.ljust(100, b"\0")
        + b"0000644\0"
        + b"0000000\0" * 2
        + field
        + b"00000000000\0"
        + b" " * 8
        + kind
        + link.ljust(100, b"\0")
    )
    block += b"ustar\x0000" + b"\0" * 32 * 2 + b"0000000\0" * 2
    block = bytearray(block.ljust(BLOCK, b"\0"))
    block[148:156] = b"%06o\0 " % (sum(block) if checksum is None else checksum)
    return bytes(block)


def data(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % BLOCK)


def member(name: bytes, content: bytes = b"data", **more) -> bytes:
    return header(name, len(content), **more) + data(content)


def tar(*parts: bytes, end: bytes = b"\0" * 1024) -> bytes:
    return b"".join(parts) + end


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    return header(b"pax", len(records), kind) + data(records)


def record(keyword: bytes, value: bytes) -> bytes:
    body = b" " + keyword + b"=" + value + b"\n"
    n = len(body)
    while len(b"%d" % n) + len(body) != n:
        n = len(b"%d" % n) + len(body)
    return b"%d" % n + body


def base256(n: int) -> bytes:
    return (n & ((1 << 96) - 1) | (1 << 95)).to_bytes(12, "big")


def zipped(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as z:
        for name, content in members:
            z.writestr(name, content)
    return out.getvalue()


def patched(archive: bytes, signature: bytes, at: int, value: bytes, which: int = 0) -> bytes:
    """`value` written `at` bytes behind the `which`-th `signature`."""
    start = -1
    for _ in range(which + 1):
        start = archive.index(signature, start + 1)
    return archive[: start + at] + value + archive[start + at + len(value) :]


LOCAL, CENTRAL, END, END64 = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06"


def locator(at: int) -> bytes:
    """A zip64 locator that points at `at`, and the end record behind it."""
    return b"PK\x06\x07" + struct.pack("<IQI", 0, at, 1) + STORED[-22:]


def lz4_frame(blocks: list[tuple[bytes, bool]], *, end: bool = True) -> bytes:
    """A frame of blocks that are (bytes, compressed), without checksums."""
    descriptor = b"\x60\x70"
    frame = b"\x04\x22\x4d\x18" + descriptor + bytes([xxh32(descriptor) >> 8 & 0xFF])
    for block, compressed in blocks:
        frame += struct.pack("<I", len(block) | (0 if compressed else 1 << 31)) + block
    return frame + (b"\0\0\0\0" if end else b"")


def lz4_zeros(n: int) -> bytes:
    """A block of `n` zeros: one literal, then one match at distance 1."""
    more = n - 1 - 5 - 19  # the block ends in five literals
    return b"\x1f\0\x01\0" + b"\xff" * (more // 255) + bytes([more % 255]) + b"\x50" + b"\0" * 5


def xxh32(text: bytes) -> int:
    """XXH32 of fewer than 16 bytes."""
    p1, p2, p3, p4, p5, mask = 2654435761, 2246822519, 3266489917, 668265263, 374761393, 0xFFFFFFFF
    rotate = lambda x, r: ((x << r) | (x >> (32 - r))) & mask  # noqa: E731
    h, i = (p5 + len(text)) & mask, 0
    while i + 4 <= len(text):
        h, i = rotate((h + struct.unpack_from("<I", text, i)[0] * p3) & mask, 17) * p4 & mask, i + 4
    for b in text[i:]:
        h = rotate((h + b * p5) & mask, 11) * p1 & mask
    h = (h ^ h >> 15) * p2 & mask
    h = (h ^ h >> 13) * p3 & mask
    return h ^ h >> 16


GOOD = member(b"a", b"first") + member(b"b", b"second")
ZIP = zipped(("a", b"first " * 100), ("b", b"second " * 100))
STORED = zipped(("a", b"first"), ("b", b"second"), method=zipfile.ZIP_STORED)
BOMB = 16 << 20

ARCHIVES = {
    # Tars.
    "good.tar": lambda: tar(GOOD),
    "links.tar": lambda: tar(
        header(b"soft", kind=b"2", link=b"/etc/passwd"),
        header(b"hard", kind=b"1", link=b"../../x"),
        header(b"dir/", kind=b"5"),
        header(b"null", kind=b"3"),
        header(b"disk", kind=b"4"),
        header(b"fifo", kind=b"6"),
        header(b"odd", kind=b"Z"),
        member(b"file"),
    ),
    "linkdata.tar": lambda: tar(header(b"soft", 512, b"2", link=b"x"), member(b"after", b"here")),
    "climbing.tar": lambda: tar(
        member(b"../../escape"),
        member(b"/absolute", b"abs"),
        member(b"a/../b"),
        member(b"./dot", b"dotted"),
        member(b"a//b", b"double"),
    ),
    "nul.tar": lambda: tar(member(b"cut\0off", b"nul")),
    "latin.tar": lambda: tar(member(b"caf\xe9", b"latin"), member(b"ok", b"fine")),
    "noname.tar": lambda: tar(member(b"", b"nameless"), member(b"ok", b"fine")),
    "twice.tar": lambda: tar(member(b"a", b"old"), member(b"a", b"new")),
    "cut-data.tar": lambda: tar(GOOD, header(b"c", 100_000), end=b"x" * 1000),
    "cut-header.tar": lambda: GOOD + header(b"c", 4)[:300],
    "no-end.tar": lambda: GOOD,
    "one-zero.tar": lambda: tar(GOOD, end=b"\0" * 512),
    "empty.tar": lambda: b"",
    "zeros.tar": lambda: b"\0" * 10240,
    "text.tar": lambda: b"this is no tar at all\n" * 100,
    "short.tar": lambda: b"x" * 100,
    "checksum.tar": lambda: tar(GOOD, header(b"c", 4, checksum=1) + data(b"data")),
    "hidden.tar": lambda: tar(GOOD, b"\0" * 512, member(b"hidden")),
    "behind.tar": lambda: tar(GOOD) + member(b"behind"),
    "octal.tar": lambda: tar(header(b"c", size_field=b"77777777777\0"), GOOD),
    "notoctal.tar": lambda: tar(header(b"c", size_field=b"0000000000x\0"), GOOD),
    "negative.tar": lambda: tar(header(b"c", size_field=base256(-512)), GOOD),
    "huge256.tar": lambda: tar(header(b"c", size_field=base256(1 << 80)), GOOD),
    "max256.tar": lambda: tar(header(b"c", size_field=base256((1 << 63) - 1)), GOOD),
    "good256.tar": lambda: tar(header(b"c", size_field=base256(4)) + data(b"data"), GOOD),
    "paxsize.tar": lambda: tar(pax(record(b"size", b"5")), header(b"c", 4), data(b"large")),
    "paxhuge.tar": lambda: tar(pax(record(b"size", b"9223372036854775807")), member(b"c"), GOOD),
    "paxover.tar": lambda: tar(pax(record(b"size", b"99999999999999999999")), member(b"c"), GOOD),
    "paxminus.tar": lambda: tar(pax(record(b"size", b"-1")), member(b"c"), GOOD),
    "paxjunk.tar": lambda: tar(pax(b"not a record at all\n"), member(b"c")),
    "paxlong.tar": lambda: tar(pax(b"999999 path=x\n"), member(b"c")),
    "paxclimb.tar": lambda: tar(pax(record(b"path", b"../../escape")), member(b"c")),
    "paxglobal.tar": lambda: tar(
        pax(record(b"path", b"everything"), b"g"), member(b"c", b"1"), member(b"d", b"2")
    ),
    "paxgiant.tar": lambda: tar(header(b"pax", 64 << 20, b"x"), end=b"1 " * (1 << 20)),
    "paxalone.tar": lambda: tar(pax(record(b"path", b"alone"))),
    "manypax.tar": lambda: tar(
        *[pax(record(b"path", b"p%d" % i)) for i in range(2000)], member(b"c")
    ),
    "longname.tar": lambda: tar(
        header(b"././@LongLink", 5001, b"L") + data(b"n" * 5000 + b"\0"),
        member(b"c"),
        member(b"ok", b"fine"),
    ),
    "longgiant.tar": lambda: tar(header(b"././@LongLink", 1 << 40, b"L"), member(b"c")),
    "sparse.tar": lambda: tar(
        header(b"holes", 512, b"S"), data(b"x" * 512), member(b"ok", b"fine")
    ),
    "sparsepax.tar": lambda: tar(
        pax(
            record(b"GNU.sparse.major", b"1")
            + record(b"GNU.sparse.name", b"holes")
            + record(b"GNU.sparse.realsize", b"1099511627776")
        ),
        member(b"c"),
        member(b"ok", b"fine"),
    ),
    # Compressed tars.
    "good.tar.gz": lambda: gzip.compress(tar(GOOD)),
    "cut.tar.gz": lambda: gzip.compress(tar(GOOD))[:-20],
    "crc.tar.gz": lambda: gzip.compress(tar(GOOD))[:-8] + b"\0" * 8,
    "text.tar.gz": lambda: b"no gzip at all",
    "trailing.tar.gz": lambda: gzip.compress(tar(GOOD)) + b"junk behind the end",
    "two.tar.gz": lambda: gzip.compress(tar(GOOD)[:700]) + gzip.compress(tar(GOOD)[700:]),
    "bomb.tar.gz": lambda: gzip.compress(tar(member(b"zeros", b"\0" * BOMB)), 9),
    "endless.tar.gz": lambda: gzip.compress(b"\0" * BOMB, 9),
    "names.tar.gz": lambda: gzip.compress(
        tar(*[member(b"m%d" % i, b"") for i in range(20_000)]), 6
    ),
    "bomb.tar.lz4": lambda: lz4_frame(
        [(header(b"zeros", BOMB - 1024), False)] + [(lz4_zeros(4 << 20), True)] * (BOMB >> 22)
    ),
    "distance.tar.lz4": lambda: lz4_frame([(b"\x1fx\xff\xff\x20\x50" + b"\0" * 5, True)]),
    "noend.tar.lz4": lambda: lz4_frame([(tar(GOOD), False)], end=False),
    "header.tar.lz4": lambda: b"\x04\x22\x4d\x18\x60\x70\x00" + b"\0" * 20,
    "giant.tar.lz4": lambda: (
        b"\x04\x22\x4d\x18\x60\x70"
        + bytes([xxh32(b"\x60\x70") >> 8 & 0xFF])
        + struct.pack("<I", 0x7FFFFFFF)
        + b"x" * 100
    ),
    # Zips.
    "good.zip": lambda: ZIP,
    "text.zip": lambda: b"PK\x03\x04 and nothing behind it",
    "empty.zip": lambda: b"",
    "nothing.zip": lambda: zipped(),
    "cut.zip": lambda: ZIP[:-30],
    "encrypted.zip": lambda: patched(patched(ZIP, LOCAL, 6, b"\x01\x00"), CENTRAL, 8, b"\x01\x00"),
    "method.zip": lambda: patched(patched(ZIP, LOCAL, 8, b"\x63\x00"), CENTRAL, 10, b"\x63\x00"),
    "crc.zip": lambda: patched(ZIP, CENTRAL, 16, b"\0\0\0\0"),
    "larger.zip": lambda: patched(ZIP, CENTRAL, 24, struct.pack("<I", 601)),
    "smaller.zip": lambda: patched(ZIP, CENTRAL, 24, struct.pack("<I", 5)),
    "giant.zip": lambda: patched(ZIP, CENTRAL, 24, struct.pack("<I", 0xFFFFFFFE)),
    "stored-lie.zip": lambda: patched(STORED, CENTRAL, 20, struct.pack("<I", 100_000)),
    "overlap.zip": lambda: patched(STORED, CENTRAL, 42, struct.pack("<I", 0), 1),
    "outside.zip": lambda: patched(STORED, CENTRAL, 42, struct.pack("<I", 0x7FFFFFFF)),
    "nolocal.zip": lambda: patched(STORED, LOCAL, 0, b"XXXX"),
    "localname.zip": lambda: patched(STORED, LOCAL, 26, b"\xff\xff"),
    "count.zip": lambda: patched(patched(STORED, END, 8, b"\x07\x00"), END, 10, b"\x07\x00"),
    "directory.zip": lambda: patched(STORED, END, 12, struct.pack("<I", 0x7FFFFFFF)),
    "comment.zip": lambda: patched(STORED, END, 20, b"\xff\xff"),
    "disks.zip": lambda: patched(STORED, END, 4, b"\x01\x00"),
    "climbing.zip": lambda: zipped(("../../escape", b"x"), ("/absolute", b"abs"), ("dir/", b"")),
    "twice.zip": lambda: STORED.replace(b"b", b"a"),
    "bomb.zip": lambda: zipped(("zeros", b"\0" * BOMB)),
    "junkbefore.zip": lambda: b"#!/bin/sh\n" * 10 + STORED,
    "zip64.zip": lambda: (
        STORED[:-22]
        + END64
        + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1 << 60, 1 << 60, 1 << 62, 1 << 62)
        + locator(len(STORED) - 22)
    ),
    "locator64.zip": lambda: STORED[:-22] + locator((1 << 64) - 1),
}

assert xxh32(b"") == 0x02CC5D05 and xxh32(b"a") == 0x550D7456
