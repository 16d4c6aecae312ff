"""The filesystem `forebay://`."""

from __future__ import annotations

import datetime
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import dataset
import duckdb
import forebay
import forebay.checkpoint as ckpt
import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from forebay._pools import Pool
from forebay.fsspec import ForebayFileSystem
from fsspec.callbacks import Callback
from fsspec.spec import AbstractFileSystem
from servers import Node


@pytest.fixture(scope="module")
def fs(node):
    return fsspec.filesystem("forebay", url=node.url)


def test_the_protocol_is_registered_by_installing_the_package(node):
    with fsspec.open("forebay://train/one", url=node.url) as file:
        assert file.read() == b"1"
    assert type(fsspec.filesystem("forebay", url=node.url)).__module__ == "forebay.fsspec"


def test_reading(fs, objects):
    assert fs.cat_file("train/img/0003.bin") == objects["img/0003.bin"]
    big = objects["big/8MiB"]
    assert fs.cat_file("forebay://train/big/8MiB", 1_000_000, 2_500_000) == big[1_000_000:2_500_000]
    assert (
        fs.cat_file("train/big/8MiB", -100) == big[-100:] and fs.cat_file("train/one", 1, 1) == b""
    )
    with fs.open("train/big/8MiB") as file:
        assert file.size == len(big)
        file.seek(5_000_000)
        assert file.read(100_000) == big[5_000_000:5_100_000]
        file.seek(-10, 2)
        assert file.read() == big[-10:]


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "ais", "forebay"])
def test_schemes_before_a_bucket_mean_that_bucket(fs, objects, scheme, tmp_path):
    name = f"{scheme}://train/img/0003.bin"
    assert fs.exists(name) and fs.isfile(name) and fs.cat(name) == objects["img/0003.bin"]
    assert fs.info(name)["name"] == "train/img/0003.bin"
    assert fs.glob(f"{scheme}://train/img/000[12].bin") == [f"train/img/{n:04}.bin" for n in (1, 2)]
    assert fs.ls(f"{scheme}://train/img", detail=False) == fs.ls("train/img", detail=False)
    fs.get(name, str(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == objects["img/0003.bin"]
    assert fs.unstrip_protocol("train/a") == "forebay://train/a"


@pytest.mark.parametrize("option, said", [("endpoint_url", "url="), ("key", "token="), ("x", "ca")])
def test_an_option_of_another_filesystem_is_explained(node, option, said):
    with pytest.raises(TypeError, match=rf"no option {option!r} \(.*{said}"):
        fsspec.filesystem("forebay", url=node.url, **{option: "a"})


def test_many_objects_are_one_batch(fs, objects):
    names = [f"train/img/{i:04}.bin" for i in range(50)]
    assert fs.cat(names) == {n: objects[n.removeprefix("train/")] for n in names}
    mixed = fs.cat(["train/one", "train/nope"], on_error="return")
    assert mixed["train/one"] == b"1" and isinstance(mixed["train/nope"], FileNotFoundError)
    assert fs.cat(["train/one", "train/nope"], on_error="omit") == {"train/one": b"1"}
    with pytest.raises(forebay.Error):
        fs.cat(["train/one", "train/nope"])
    big = objects["big/8MiB"]
    assert fs.cat_ranges(
        ["train/big/8MiB", "train/one", "train/big/8MiB"], [10, 0, 100], [20, 1, None]
    ) == [big[10:20], b"1", big[100:]]


def test_looking(fs, objects):
    assert fs.info("train/img/0003.bin") | {
        "name": "train/img/0003.bin",
        "size": len(objects["img/0003.bin"]),
        "type": "file",
    } == fs.info("train/img/0003.bin")
    assert fs.exists("train/one") and not fs.exists("train/nope") and fs.isfile("train/one")
    assert (
        fs.isdir("train")
        and fs.isdir("train/img")
        and not fs.isdir("train/one")
        and not fs.isdir("train/im")
    )
    assert fs.ls("train/shards", detail=False) == sorted(f"train/{n}" for n in dataset.shards())
    top = {e["name"]: e["type"] for e in fs.ls("train")}
    assert top["train/one"] == "file" and top["train/img"] == "directory"
    assert {"train", "other"} <= set(fs.ls("", detail=False))
    assert fs.find("train") == sorted(f"train/{n}" for n in objects)
    assert fs.find("train/img") == fs.glob("train/img/*.bin")
    assert fs.glob("train/img/000?.bin") == [f"train/img/000{i}.bin" for i in range(10)]
    assert fs.du("train/img") == sum(len(v) for k, v in objects.items() if k.startswith("img/"))
    for missing in (
        lambda: fs.info("train/nope"),
        lambda: fs.open("train/nope"),
        lambda: fs.ls("train/nope/"),
        lambda: fs.cat_file("train/nope"),
    ):
        with pytest.raises(FileNotFoundError):
            missing()
    assert fs.modified("train/one").year >= 2024 and fs.ukey("train/one") == fs.checksum(
        "train/one"
    )


def test_a_directory_is_not_opened_as_an_empty_file(fs, node, scratch):
    fs.pipe(f"scratch/{scratch}/d/x", b"1")
    # A manifest of something else, smaller than what is looked at.
    fs.pipe(f"scratch/{scratch}/other/manifest.json", b"{}")
    for path in ("train", "train/img/", f"scratch/{scratch}/d", f"scratch/{scratch}/other"):
        with pytest.raises(IsADirectoryError, match=r"is a directory.*ls\("):
            fs.open(path)
    with pytest.raises(IsADirectoryError), fs.open("train/img", "r"):
        pass
    name = f"scratch/{scratch}/step-1"
    ckpt.save({"a": 1}, f"s3://{name}", client=forebay.Client(node.url)).wait(60)
    with pytest.raises(IsADirectoryError, match=rf"forebay.checkpoint.load\('s3://{name}'\)"):
        fsspec.open(f"forebay://{name}", url=node.url).open()
    with pytest.raises(FileNotFoundError):
        fs.open("not-a-bucket")


def test_writing(fs, origin_s3, scratch):
    base = f"scratch/{scratch}"
    data = dataset.noise(9_000_000)
    with fs.open(f"{base}/big", "wb") as file:
        for at in range(0, len(data), 1_000_000):
            file.write(data[at : at + 1_000_000])
    assert fs.cat_file(f"{base}/big") == data
    assert origin_s3.get_object(Bucket="scratch", Key=f"{scratch}/big")["Body"].read() == data
    with fs.open(f"{base}/empty", "wb"):
        pass
    fs.pipe({f"{base}/a": b"A", f"{base}/d/b": b"B"})
    fs.copy(f"{base}/a", f"{base}/c")
    fs.mv(f"{base}/c", f"{base}/moved")
    assert {k.removeprefix(f"{base}/"): fs.size(k) for k in fs.find(base)} == {
        "a": 1,
        "big": len(data),
        "d/b": 1,
        "empty": 0,
        "moved": 1,
    }
    with fs.open(f"{base}/text", "w") as file:
        file.write("zeile\n")
    assert fs.read_text(f"{base}/text") == "zeile\n"
    with pytest.raises(FileExistsError):
        fs.open(f"{base}/a", "xb")
    fs.rm(base, recursive=True)
    assert fs.find(base) == [] and not fs.exists(base)


def test_past_the_end_there_is_nothing(fs, objects, scratch):
    name = f"scratch/{scratch}/empty"
    fs.pipe_file(name, b"")
    assert fs.cat_file(name, 0, 10) == b"" == fs.cat_file("train/one", 1, 5)
    assert fs.cat_file("train/one", 5) == b"" and fs.cat_file("train/one", 0, 5) == b"1"
    for on_error in ("raise", "return"):
        found = fs.cat_ranges(["train/one", "train/one", name], 0, [1, 9, 9], on_error=on_error)
        assert found == [b"1", b"1", b""]
        found = fs.cat_ranges(["train/one", "train/one"], [7, 0], [9, 1], on_error=on_error)
        assert found == [b"", b"1"]
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(["train/one", "train/nope"], [7, 0], [9, 1], on_error="raise")


def test_copies_keep_what_is_noted_with_an_object(fs, origin_s3, objects, scratch, monkeypatch):
    noted = {"ContentType": "text/csv", "CacheControl": "no-cache", "Metadata": {"run": "7"}}
    source = f"scratch/{scratch}/from"
    origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/from", Body=b"a,b", **noted)

    def is_kept(bucket, key):
        head = origin_s3.head_object(Bucket=bucket, Key=key)
        return {name: head.get(name) for name in noted} == noted

    fs.cp_file(source, f"scratch/{scratch}/one ü+?&#%2F.csv")
    fs.copy(source, f"other/{scratch}")
    fs.copy(f"scratch/{scratch}", f"scratch/{scratch}-tree", recursive=True)
    fs.mv(f"scratch/{scratch}-tree/from", f"scratch/{scratch}-moved")
    copied = [f"scratch/{scratch}/one ü+?&#%2F.csv", f"other/{scratch}", f"scratch/{scratch}-moved"]
    copied.append(f"scratch/{scratch}-tree/one ü+?&#%2F.csv")
    assert all(is_kept(*name.split("/", 1)) and fs.cat(name) == b"a,b" for name in copied)
    assert not fs.exists(f"scratch/{scratch}-tree/from")
    # Onto itself, and one for which the node is given more time.
    fs.copy(source, source)
    assert is_kept("scratch", f"{scratch}/from")
    monkeypatch.setattr("forebay.fsspec.SPOOL_MAX_BYTES", 1 << 20)
    fs.copy("train/big/8MiB", f"scratch/{scratch}/copy")
    assert fs.cat_file(f"scratch/{scratch}/copy") == objects["big/8MiB"]
    with pytest.raises(FileNotFoundError):
        fs.copy(f"scratch/{scratch}/no", f"scratch/{scratch}/none")
    fs.rm(f"other/{scratch}")


def test_get_and_put_files(fs, scratch, tmp_path):
    (tmp_path / "up").mkdir()
    for name in ("x", "y"):
        (tmp_path / "up" / name).write_bytes(name.encode() * 1000)
    fs.put(str(tmp_path / "up"), f"scratch/{scratch}", recursive=True)
    fs.get(f"scratch/{scratch}", str(tmp_path / "down"), recursive=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "down").rglob("*") if p.is_file()} == {
        "x": b"x" * 1000,
        "y": b"y" * 1000,
    }


class Progress(Callback):
    """What was told of each transfer, in a form in which two threads would spoil it."""

    def __init__(self):
        super().__init__()
        self.children, self.inside = {}, 0

    def branched(self, source, target, **kwargs):
        self.children[source] = child = Progress()
        return child

    def call(self, *args, **kwargs):
        self.inside += 1
        time.sleep(0.001)
        assert self.inside == 1
        self.inside -= 1


def requests(node):
    return sum(v for name, v in node.metrics().items() if name.startswith("forebay_requests_total"))


def test_files_are_transferred_at_the_same_time(fs, node, scratch, tmp_path, monkeypatch):
    base = f"scratch/{scratch}"
    files = {f"d{i % 3}/{i:02}": b"x" * i for i in range(24)}
    for name, data in files.items():
        path = tmp_path / "up" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def took(call, *args, **options):
        before = requests(node)
        call(*args, recursive=True, **options)
        return requests(node) - before

    def told(progress):
        """How many files, and the bytes of each."""
        assert progress.size == progress.value
        assert all(child.size == child.value for child in progress.children.values() if child.size)
        sizes = {name.split("/d", 1)[-1]: c.value for name, c in progress.children.items()}
        return {f"d{name}": size for name, size in sizes.items() if f"d{name}" in files}

    sizes = {name: len(data) for name, data in files.items()}
    up, down = Progress(), Progress()
    # One request for each file (two for one that is empty), and a few for the directory.
    assert took(fs.put, str(tmp_path / "up"), base, callback=up) <= len(files) + 4
    assert told(up) == sizes
    assert took(fs.get, base, str(tmp_path / "down"), callback=down) <= len(files) + 5
    assert told(down) == sizes
    assert took(fs.copy, f"{base}", f"{base}-copy") <= len(files) + 4
    assert took(fs.get, f"{base}-copy/*", str(tmp_path / "glob")) <= len(files) + 9
    for where in ("down", "glob"):
        paths = [p for p in (tmp_path / where).rglob("*") if p.is_file()]
        got = {str(p.relative_to(tmp_path / where)): p.read_bytes() for p in paths}
        assert got == files
    assert fs.cat(f"{base}-copy", recursive=True) == {
        f"{base}-copy/{name}": data for name, data in files.items()
    }
    before = requests(node)
    assert len(fs.cat(f"{base}-copy/d*/*", recursive=True)) == len(files)
    assert len(fs.expand_path([f"{base}-copy/*", base], recursive=True)) == 2 * (len(files) + 3) + 1
    assert requests(node) - before < 20

    together = threading.Barrier(4)
    monkeypatch.setattr(fs, "get_file", lambda *args, **options: together.wait(30))
    fs.get(base + "/d1/*", str(tmp_path / "no"), batch_size=4)
    fs.get(fs.find(base)[:8], str(tmp_path / "no") + "/", batch_size=4)
    with pytest.raises(ValueError):
        fs.get(base, str(tmp_path / "no"), recursive=True, batch_size=0)
    one = fsspec.filesystem("forebay", url=node.url, batch_size=1)
    threads = set()
    monkeypatch.setattr(one, "get_file", lambda *a, **k: threads.add(threading.get_ident()))
    one.get(base, str(tmp_path / "no"), recursive=True)
    assert threads == {threading.get_ident()}


def test_a_transfer_that_fails_leaves_no_part(fs, scratch, tmp_path, monkeypatch):
    base = f"scratch/{scratch}"
    data = dataset.noise(300_000)
    fs.pipe({f"{base}/{name}": data for name in ("a", "b", "c")})
    monkeypatch.setattr("forebay.fsspec.PIECE_BYTES", 100_000)
    piece = ForebayFileSystem._piece
    other = threading.Event()

    def pieces(self, name, start, length):
        if start == 200_000:
            if name.endswith("/b"):
                other.wait(30)
                raise forebay.ConnectionFailed("gone")
            other.set()
            # Given up, when the other has failed.
            time.sleep(2)
        return piece(self, name, start, length)

    monkeypatch.setattr(ForebayFileSystem, "_piece", pieces)
    with pytest.raises(forebay.ConnectionFailed, match="gone"):
        fs.get(base, str(tmp_path / "down"), recursive=True)
    assert [*(tmp_path / "down").iterdir()] == []
    monkeypatch.undo()

    for when in (0, 100_000):

        def overwrites(self, name, start, length, when=when):
            got = piece(self, name, start, length)
            if start == when:
                fs.pipe(name, data[:1000])
            return got

        fs.pipe(f"{base}/c", data)
        monkeypatch.setattr("forebay.fsspec.PIECE_BYTES", 100_000)
        monkeypatch.setattr(ForebayFileSystem, "_piece", overwrites)
        with pytest.raises(forebay.Changed):
            fs.get(f"{base}/c", str(tmp_path / "c"))
        assert not (tmp_path / "c").exists()
        monkeypatch.undo()
    # What was there stays, if another one fails before a file is written.
    failed = threading.Event()

    def waits(self, name, start, length):
        if name.endswith("/no"):
            failed.set()
            raise forebay.NotFound(name)
        got = piece(self, name, start, length)
        failed.wait(30)
        time.sleep(2)
        return got

    (tmp_path / "kept").write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(ForebayFileSystem, "_piece", waits)
        with pytest.raises(FileNotFoundError):
            fs.get([f"{base}/a", f"{base}/no"], [str(tmp_path / "kept"), str(tmp_path / "none")])
    assert (tmp_path / "kept").read_bytes() == b"old"
    # Neither is it touched, if there is nothing to read.
    (tmp_path / "there").write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        fs.get([f"{base}/a", f"{base}/no"], [str(tmp_path / "a"), str(tmp_path / "there")])
    assert (tmp_path / "there").read_bytes() == b"old"
    # Of two sources for one target, the last one.
    fs.pipe(f"{base}/d/a", b"last")
    fs.get([f"{base}/a", f"{base}/d/a"], [str(tmp_path / "a")] * 2)
    assert (tmp_path / "a").read_bytes() == b"last"
    fs.get(f"{base}/d/a", tmp_path / "by-path")
    fs.put(tmp_path / "by-path", f"{base}/e/by-path")
    assert fs.cat(f"{base}/e/by-path") == b"last"
    file = io.BytesIO()
    fs.get_file(f"{base}/a", file)
    assert file.getvalue() == data
    with pytest.raises(IsADirectoryError):
        fs.get_file(f"{base}/d", file)
    fs.get_file(f"{base}/d", str(tmp_path / "made"))
    assert (tmp_path / "made").is_dir()
    # A transaction writes at its end.
    (tmp_path / "x").write_bytes(b"x")
    with fs.transaction:
        fs.put(str(tmp_path / "x"), f"{base}/x")
        assert not fs.exists(f"{base}/x")
    assert fs.cat(f"{base}/x") == b"x"
    with pytest.raises(FileExistsError):
        fs.put_file(str(tmp_path / "x"), f"{base}/x", mode="create")


def test_a_local_file_is_replaced_whole_or_not_at_all(fs, scratch, tmp_path, monkeypatch):
    base, old, new = f"scratch/{scratch}", b"old" * 1000, dataset.noise(300_000)
    fs.pipe(f"{base}/a", new)
    monkeypatch.setattr("forebay.fsspec.PIECE_BYTES", 100_000)
    piece = ForebayFileSystem._piece
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to("target")
    target.write_bytes(old)
    target.chmod(0o640)

    def breaks_off(self, name, start, length):
        # What was there is there meanwhile, too.
        assert target.read_bytes() == old
        if start == 200_000:
            raise forebay.ConnectionFailed("gone")
        return piece(self, name, start, length)

    with monkeypatch.context() as patch:
        patch.setattr(ForebayFileSystem, "_piece", breaks_off)
        for path in (target, link):
            with pytest.raises(forebay.ConnectionFailed):
                fs.get(f"{base}/a", str(path))
            assert target.read_bytes() == old and {*tmp_path.iterdir()} == {target, link}
    fs.get(f"{base}/a", str(link))
    assert link.is_symlink() and target.read_bytes() == new
    assert target.stat().st_mode & 0o777 == 0o640
    # A new file has the mode that any has.
    fs.get(f"{base}/a", str(tmp_path / "made"))
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "plain").stat().st_mode
    # A pipe stays one.
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit((tmp_path / "pipe").read_bytes)
        fs.get_file(f"{base}/a", str(tmp_path / "pipe"))
        assert got.result(60) == new
    with pytest.raises(IsADirectoryError):
        fs.get_file(f"{base}/a", str(tmp_path))
    with pytest.raises(OSError, match="File name too long.*xxx'"):
        fs.get_file(f"{base}/a", str(tmp_path / ("x" * 300)))
    names = {"target", "link", "made", "plain", "pipe"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_one_piece_of_a_file_is_in_memory(fs, scratch, tmp_path, monkeypatch):
    fs.pipe(f"scratch/{scratch}", b"x" * 400_000)
    monkeypatch.setattr("forebay.fsspec.PIECE_BYTES", 100_000)
    piece, alive, most = ForebayFileSystem._piece, [], []

    class Counted(bytearray):
        def __del__(self):
            alive.pop()

    def pieces(self, name, start, length):
        most.append(len(alive))
        got = piece(self, name, start, length)
        counted = Counted(got)
        counted.etag = got.etag
        alive.append(1)
        return counted

    monkeypatch.setattr(ForebayFileSystem, "_piece", pieces)
    fs.get_file(f"scratch/{scratch}", str(tmp_path / "x"))
    assert (tmp_path / "x").read_bytes() == b"x" * 400_000 and most == [0] * 4


def test_a_file_that_is_written_meanwhile_is_put_as_it_was(fs, scratch, tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.fsspec.PIECE_BYTES", 100_000)
    file, name = tmp_path / "log", f"scratch/{scratch}/log"
    data = bytes(range(250)) * 1000

    class Writes(Callback):
        def __init__(self, size):
            super().__init__()
            self.file_size = size

        def set_size(self, size):
            assert size == len(data)
            with file.open("r+b") as log:
                log.truncate(min(self.file_size, size))
                log.seek(0, 2)
                log.write(b"+" * max(0, self.file_size - size))

    file.write_bytes(data)
    fs.put_file(str(file), name, callback=Writes(len(data) + 5))
    assert fs.cat(name) == data
    file.write_bytes(data)
    with pytest.raises(forebay.Conflict, match="the local file has become shorter"):
        fs.put_file(str(file), f"{name}-2", callback=Writes(len(data) - 5))
    assert not fs.exists(f"{name}-2")


def test_what_is_interrupted_begins_no_more_files(fs, monkeypatch):
    submit, begun, done, go_on = Pool.submit, [], [], threading.Event()

    def interrupted(self, *args):
        if len(begun) == 20:
            threading.Timer(2, go_on.set).start()
            raise KeyboardInterrupt
        begun.append(1)
        return submit(self, *args)

    def one(item):
        go_on.wait(30)
        done.append(item)

    monkeypatch.setattr(Pool, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fs._each(one, range(100), 4)
    assert len(done) <= 4


def test_files_are_still_written_when_the_interpreter_ends(fs, node, scratch, tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode())
    script = (
        "import atexit, fsspec\n"
        f"fs = fsspec.filesystem('forebay', url={node.url!r})\n"
        f"atexit.register(fs.put, {str(tmp_path)!r}, 'scratch/{scratch}', recursive=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    names = [f"scratch/{scratch}/{name}" for name in "abc"]
    assert fs.cat(names) == dict(zip(names, [b"a", b"b", b"c"], strict=True))


class Names:
    """The names of an origin in which an object may be called as a directory is."""

    def __init__(self, *names):
        self.names = set(names)

    def head(self, name):
        name = "/".join(name)
        if name not in self.names:
            raise forebay.NotFound(name)
        return self.about(name)

    def about(self, name):
        key = name.partition("/")[2]
        return SimpleNamespace(name=name, key=key, size=1, etag='"e"', last_modified=None)

    def list(self, prefix, page_size=1000, recursive=True):
        prefix += "" if "/" in prefix else "/"
        found = {name for name in self.names if name.startswith(prefix)}
        if not recursive:
            heads = ((name, *name[len(prefix) :].partition("/")) for name in found)
            found = {prefix + head + slash if slash else name for name, head, slash, _ in heads}
        return iter([self.about(name) for name in sorted(found)])

    def delete(self, name):
        self.names.remove(name)


def test_an_object_and_a_directory_of_one_name():
    names = {"bk/a", "bk/a/b", "bk/a/c/d"}
    client = Names("bk/other", *names)
    fs = fsspec.filesystem("forebay", client=client)
    for path, depth in (("bk/a", None), ("bk/a*", None), ("bk/a*", 3), ("bk/a", 2)):
        assert set(fs.expand_path(path, recursive=True, maxdepth=depth)) == {*names, "bk/a/c"}
    assert fs.expand_path("bk/a*", recursive=True, maxdepth=1) == ["bk/a"]
    assert fs.expand_path("bk/a*", recursive=True, maxdepth=2) == ["bk/a", "bk/a/b", "bk/a/c"]
    # A path that a pattern has too, in any order.
    for paths in (["bk/*", "bk/a"], ["bk/a", "bk/*"]):
        assert {*names, "bk/other"} < set(fs.expand_path(paths, recursive=True, maxdepth=2))
    assert fs.find("bk/a", maxdepth=1) == ["bk/a", "bk/a/b"]
    assert set(fs.find("bk/a", maxdepth=sys.maxsize)) == names
    assert fs.info("bk/a") == fs.find("bk", detail=True)["bk/a"]
    with pytest.raises(ValueError):
        fs.expand_path("bk/a", recursive=True, maxdepth=0)
    fs.rm("bk/a*", recursive=True)
    assert client.names == {"bk/other"}


def test_parquet_through_it(fs, scratch):
    table = pa.table({"a": range(1000), "b": [str(i) for i in range(1000)]})
    with fs.open(f"scratch/{scratch}.parquet", "wb") as file:
        pa.parquet.write_table(table, file)
    assert pa.parquet.read_table(f"scratch/{scratch}.parquet", filesystem=fs).equals(table)


def test_it_survives_pickling(fs):
    assert pickle.loads(pickle.dumps(fs)).cat_file("train/one") == b"1"


def test_ranges_from_the_end_and_empty_ones(fs, objects):
    big = objects["big/8MiB"][:100]
    fs.pipe("scratch/ranges", big)
    asked = [(0, -1), (10, 9), (10, -80), (-5, None), (None, None), (3, 3), (90, 200)]
    starts, ends = zip(*asked, strict=True)
    got = fs.cat_ranges(["scratch/ranges"] * len(asked), list(starts), list(ends))
    assert got == [big[s:e] for s, e in asked]


def test_what_is_not_there_is_told_from_what_cannot_be_read(fs):
    names = ["scratch/cat/there", *(f"scratch/cat/no-{i}" for i in range(30))]
    fs.pipe(names[0], b"1")
    for on_error in ("return", "omit"):
        got = fs.cat(names, on_error=on_error)
        assert got.pop(names[0]) == b"1" and len(got) == (30 if on_error == "return" else 0)
        assert all(isinstance(e, FileNotFoundError) for e in got.values())
    got = fs.cat_ranges(names, 0, 1, on_error="return")
    assert got[0] == b"1" and all(isinstance(e, FileNotFoundError) for e in got[1:])
    # A name that the node refuses is not a missing file, which zarr would take for a chunk of fill
    # values.
    got = fs.cat_ranges([names[0], "scratch/" + "x" * 2000], 0, 1, on_error="return")
    assert got[0] == b"1" and isinstance(got[1], forebay.InvalidRequest)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(names[:3], 0, 1, on_error="raise")


def test_an_open_file_is_of_one_version(fs):
    fs.pipe("scratch/pinned", b"a" * 3_000_000)
    with fs.open("scratch/pinned", block_size=1 << 20) as file:
        assert file.read(10) == b"a" * 10
        fs.pipe("scratch/pinned", b"b" * 3_000_000)
        file.seek(2_500_000)
        with pytest.raises(forebay.Changed, match="scratch/pinned"):
            file.read(10)


def test_a_directory_is_listed_without_what_lies_deeper(fs, client):
    fs.pipe(
        {f"scratch/wide/{d}/{i}": b"" for d in "ab" for i in range(3)} | {"scratch/wide/c": b"1"}
    )
    found = client.list("scratch/wide/", recursive=False)
    assert "Listing of scratch/wide/" in repr(found)
    assert [info.key for info in found] == ["wide/a/", "wide/b/", "wide/c"]
    kinds = {e["name"]: e["type"] for e in fs.ls("scratch/wide")}
    assert kinds == {
        "scratch/wide/a": "directory",
        "scratch/wide/b": "directory",
        "scratch/wide/c": "file",
    }


def test_a_file_that_is_given_up_before_anything_was_written(fs):
    file = fs.open("scratch/given-up", "wb", autocommit=False)
    file.discard()
    file.closed = True
    assert not fs.exists("scratch/given-up")


def test_all_that_is_under_a_path_comes_from_one_listing(fs, origin_s3, scratch, monkeypatch):
    """Also where the directories are asked for, as by a pattern with ** and by whoever copies."""
    base = f"scratch/{scratch}"
    for key in ("f", "d/a", "d/e/f/b", "d/hollow/", "d2/c"):
        body = b"" if key.endswith("/") else b"12"
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/{key}", Body=body)
    for path in (base, f"{base}/d", f"{base}/d/e", f"{base}/d/hollow", f"{base}/f", f"{base}/no"):
        for withdirs in (False, True):
            walked = AbstractFileSystem.find(fs, path, withdirs=withdirs, detail=True)
            found = fs.find(path, withdirs=withdirs, detail=True)
            assert found.keys() == walked.keys()
            assert [e["type"] for e in found.values()] == [e["type"] for e in walked.values()]
    assert [fs.du(f"{base}{path}") for path in ("", "/d", "/f", "/no")] == [8, 4, 2, 0]
    assert fs.du(f"{base}/d", maxdepth=1) == 2
    under = {f"{base}/d/a": b"12", f"{base}/d/e/f/b": b"12"}
    assert fs.cat(f"{base}/d", recursive=True) == under
    assert fs.cat(f"{base}/d", recursive=True, end=1) == dict.fromkeys(under, b"1")
    assert fs.cat(f"{base}/d2", recursive=True) == {f"{base}/d2/c": b"12"}
    assert fs.cat(f"{base}/f", recursive=True) == b"12"
    with pytest.raises(FileNotFoundError):
        fs.cat(f"{base}/no", recursive=True)
    # As s3fs and gcsfs have it.
    assert fs.find(base, prefix="d") == [f"{base}/d/a", f"{base}/d/e/f/b", f"{base}/d2/c"]
    assert fs.find(base, prefix="d/e/", detail=True).keys() == {f"{base}/d/e/f/b"}
    assert fs.find(base, prefix="x") == fs.find("nothing", prefix="x") == []
    with pytest.raises(ValueError, match="prefix"):
        fs.find(base, prefix="d", maxdepth=1)
    assert fs.du(f"{base}/d2", total=False, withdirs=True) == {f"{base}/d2": 0, f"{base}/d2/c": 2}
    listings = []
    listed = type(fs.client).list

    def listing(client, prefix, **options):
        listings.append(prefix)
        return listed(client, prefix, **options)

    monkeypatch.setattr(type(fs.client), "list", listing)
    assert fs.glob(f"{base}/d/**/b") == [f"{base}/d/e/f/b"] and len(listings) == 1
    assert fs.du(f"{base}/d") == 4 and len(listings) == 2
    # Not those that begin alike, of which there may be many.
    assert set(listings) == {f"{base}/d/"}


def test_a_transaction_ends_before_its_files_are_closed(fs, scratch):
    base = f"scratch/{scratch}"
    with fs.transaction:
        file = fs.open(f"{base}/open", "wb", block_size=8)
        file.write(b"twelve bytes")
        file.write(b"!")
        empty = fs.open(f"{base}/empty", "wb")
        assert not fs.exists(f"{base}/open")
    assert fs.cat(f"{base}/open") == b"twelve bytes!" and fs.cat(f"{base}/empty") == b""
    with pytest.raises(ValueError):
        file.write(b"too late")
    file.close()
    empty.close()
    assert fs.cat(f"{base}/open") == b"twelve bytes!"
    for size in (1, 100):
        with pytest.raises(KeyError), fs.transaction:
            file = fs.open(f"{base}/given-up", "wb", block_size=8)
            file.write(b"x" * size)
            raise KeyError
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            file.close()
            del file
            gc.collect()
        assert not fs.exists(f"{base}/given-up")


def test_files_that_are_opened_to_append(fs, tables, scratch, monkeypatch):
    """As loggers and pandas do. What somebody else appends meanwhile is not lost."""
    local = fsspec.filesystem("forebay", url=tables.url)
    monkeypatch.setattr("forebay.fsspec.PIECE_BYTES", 4)
    for files, base in ((fs, f"scratch/{scratch}"), (local, "tables/append")):
        name = f"{base}/log"
        for line in ("first\n", "second\n", "third, which is longer\n"):
            with files.open(name, "a", block_size=8) as file:
                file.write(line)
        assert files.cat(name) == b"first\nsecond\nthird, which is longer\n"
        file = files.open(name, "ab")
        assert file.tell() == files.size(name) == 36
        file.write(b"lost")
        files.pipe(name, b"of another")
        with pytest.raises(forebay.Changed, match="log was overwritten"):
            file.close()
        assert files.cat(name) == b"of another"
        with pytest.raises(ValueError, match="rb, wb, xb or ab"):
            files.open(name, "r+b")
        # Of two that begin it, too.
        both = [files.open(f"{base}/new", "ab") for _ in range(2)]
        both[0].write(b"first")
        both[1].write(b"second")
        both[0].close()
        with pytest.raises(forebay.Changed, match="new was written while it was open"):
            both[1].close()
        assert files.cat(f"{base}/new") == b"first"
        files.rm(base, recursive=True)
    frame = pd.DataFrame({"a": [1, 2]})
    table, options = f"forebay://scratch/{scratch}.csv", {"node": fs.client.url}
    frame.to_csv(table, index=False, storage_options=options)
    frame.to_csv(table, index=False, header=False, mode="a", storage_options=options)
    assert pd.read_csv(table, storage_options=options)["a"].tolist() == [1, 2, 1, 2]


def test_what_cannot_be_opened_to_append_stays(fs, scratch, monkeypatch):
    name = f"scratch/{scratch}/log"
    fs.pipe(name, b"kept")

    def info(*args, **options):
        raise forebay.ConnectionFailed("gone")

    with monkeypatch.context() as patch:
        patch.setattr(ForebayFileSystem, "info", info)
        with pytest.raises(forebay.ConnectionFailed):
            fs.open(name, "ab")
        gc.collect()
    assert fs.cat(name) == b"kept"


def test_the_time_of_a_file_is_no_text(fs):
    """The latest text is that of a Wednesday."""
    about = fs.info("train/one")
    assert about["LastModified"] == fs.modified("train/one")
    assert about["LastModified"].utcoffset() == datetime.timedelta(0)


def test_what_cannot_be_asked_is_not_taken_for_missing(tmp_path):
    """A node that is gone, or a directory that may not be listed, is no empty one: whoever begins
    anew where nothing is, or reads what a pattern finds, must be told.
    """
    (tmp_path / "data" / "d").mkdir(parents=True)
    (tmp_path / "data" / "d" / "x").write_bytes(b"1")
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'data'}"])
    fs, hasty = (
        fsspec.filesystem("forebay", url=node.url, timeout=timeout, skip_instance_cache=True)
        for timeout in (60, 2)
    )
    assert fs.exists("data/d/x") and fs.exists("data/d") and not fs.exists("data/d/y")
    assert not fs.exists("data/d//x") and not fs.exists("nothing")
    assert list(fs.walk("nothing")) == []
    assert fs.glob("data/**/x") == fs.find("data", maxdepth=2) == ["data/d/x"]
    node.stop()
    fs = hasty
    for ask in (
        lambda: fs.exists("data/d/x"),
        lambda: list(fs.walk("data")),
        lambda: fs.glob("data/**"),
        lambda: fs.find("data", maxdepth=2),
        lambda: fs.isdir("data/d"),
        lambda: fs.isfile("data/d/x"),
    ):
        with pytest.raises(forebay.ConnectionFailed):
            ask()
    told = []
    assert list(fs.walk("data", on_error=told.append)) == []
    assert [type(e) for e in told] == [forebay.ConnectionFailed]


def test_what_is_to_be_new_replaces_nothing(fs, tables):
    """Whoever opens an object to create it, and whoever was faster: both cannot be right."""
    local = fsspec.filesystem("forebay", url=tables.url)
    for files, base in ((fs, "scratch/new"), (local, "tables/new")):
        file = files.open(f"{base}/opened", "xb")
        file.write(b"late")
        files.pipe_file(f"{base}/opened", b"first")
        with pytest.raises(FileExistsError):
            file.close()
        with pytest.raises(FileExistsError):
            files.pipe_file(f"{base}/opened", b"late", mode="create")
        with ThreadPoolExecutor(8) as pool:
            made = [
                pool.submit(files.pipe_file, f"{base}/piped", b"%d" % i, mode="create")
                for i in range(8)
            ]
        winners = [i for i, one in enumerate(made) if one.exception() is None]
        assert [type(one.exception()) for one in made].count(FileExistsError) == 7
        assert files.cat(f"{base}/opened") == b"first"
        assert files.cat(f"{base}/piped") == b"%d" % winners[0]
        files.rm(base, recursive=True)


def test_directories_that_are_empty(fs, origin_s3, scratch, tmp_path):
    """Consoles and other tools keep an object that ends in a slash for a directory."""
    base = f"scratch/{scratch}"
    for key in ("only/", "d/", "d/in/", "d/in/x"):
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/{key}", Body=b"")
    (tmp_path / "hollow").mkdir()
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'hollow'}"])
    for files, empty in (
        (fsspec.filesystem("forebay", url=node.url), "hollow"),
        (fs, f"{base}/only"),
    ):
        assert files.isdir(empty) and files.ls(empty) == []
        assert list(files.walk(empty)) == [(empty, [], [])]
        assert files.find(empty) == files.find(empty, maxdepth=1) == []
    node.stop()
    assert fs.find(f"{base}/d", maxdepth=2) == [f"{base}/d/in/x"]
    fs.get(base, str(tmp_path / "down"), recursive=True)
    assert [p.name for p in (tmp_path / "down").rglob("*") if p.is_file()] == ["x"]
    for path in ("only", "d"):
        fs.rm(f"{base}/{path}", recursive=True)
        assert not fs.exists(f"{base}/{path}")
    assert "Contents" not in origin_s3.list_objects_v2(Bucket="scratch", Prefix=scratch)


def test_what_another_removes_meanwhile_does_not_end_a_removal(fs, scratch, monkeypatch):
    base = f"scratch/{scratch}"
    fs.pipe({f"{base}/{name}": b"1" for name in "abc"})
    rm_file, gone = fs.rm_file, ["b", "a"]

    def removes(path):
        if path.rsplit("/", 1)[-1] in gone:
            gone.remove(path.rsplit("/", 1)[-1])
            fs.client.delete(path)
        rm_file(path)

    monkeypatch.setattr(fs, "rm_file", removes)
    fs.rm(base, recursive=True)
    assert fs.find(base) == gone == []
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{base}/c")


def test_a_removal_asks_for_nothing_of_each_object(fs, origin_s3, scratch, monkeypatch):
    base = f"scratch/{scratch}"
    names = [f"{base}/a/{i}" for i in range(30)] + [f"{base}/a/b/{i}" for i in range(10)]
    fs.pipe(dict.fromkeys([*names, f"{base}/other"], b"1"))
    info, asked = fs.info, []

    def counts(path, **options):
        asked.append(path)
        return info(path, **options)

    monkeypatch.setattr(fs, "info", counts)
    fs.rm([f"{base}/a"], recursive=True)
    assert len(asked) <= 2
    there = origin_s3.list_objects_v2(Bucket="scratch", Prefix=scratch)["Contents"]
    assert [o["Key"] for o in there] == [f"{scratch}/other"]


def test_filesystems_with_other_clients_are_not_equal(node):
    clients = [forebay.Client(node.url, token=token) for token in ("a", "b")]
    one, same, other = (
        fsspec.filesystem("forebay", client=client) for client in (*clients[:1] * 2, clients[1])
    )
    assert one == same and hash(one) == hash(same)
    assert one.__dask_tokenize__() == same.__dask_tokenize__()
    assert one != other and hash(one) != hash(other)
    assert one.__dask_tokenize__() != other.__dask_tokenize__()


def test_each_client_has_its_own_filesystem(node):
    one, other = forebay.Client(node.url, timeout=50), forebay.Client(node.url, timeout=60)
    assert repr(one) == repr(other)
    kept = [fsspec.filesystem("forebay", client=client) for client in (one, other)]
    assert [fs.client for fs in kept] == [one, other]
    assert pickle.loads(pickle.dumps(kept[0])).cat_file("train/one") == b"1"
    by_url = [fsspec.filesystem("forebay", url=node.url) for _ in range(2)]
    assert by_url[0] is by_url[1]


def test_duckdb_writes_partitions(fs, scratch):
    base = f"scratch/{scratch}/out"
    with duckdb.connect() as to:
        to.register_filesystem(fs)
        to.execute(
            f"copy (select range as id, range % 3 as part from range(10)) to 'forebay://{base}'"
            " (format parquet, partition_by (part), overwrite_or_ignore)"
        )
        found = f"select sum(id), max(part) from read_parquet('forebay://{base}/*/*.parquet')"
        assert to.execute(found).fetchall() == [(45, 2)]
    assert len(fs.find(base)) == 3


def test_options_that_do_not_exist_are_refused(node):
    for option in ({"nod": node.url}, {"url": node.url, "anon": True}):
        with pytest.raises(TypeError, match=next(reversed(option))):
            fsspec.filesystem("forebay", **option)
        with pytest.raises(TypeError), fsspec.open("forebay://train/one", **option):
            pass
    # Those of fsspec itself go to any filesystem.
    own = {"use_listings_cache": False, "skip_instance_cache": True, "asynchronous": False}
    files = fsspec.filesystem("forebay", url=node.url, listings_expiry_time=1, max_paths=9, **own)
    assert pickle.loads(pickle.dumps(files)).cat("train/one") == b"1"
    assert type(files).from_json(files.to_json()).cat("train/one") == b"1"


def test_libraries_that_call_their_own_argument_url(node, scratch):
    frame = pd.DataFrame({"a": range(10), "b": [f"g{i % 2}" for i in range(10)]})
    options = {"node": node.url}
    base = f"forebay://scratch/{scratch}"
    frame.to_parquet(f"{base}/t.parquet", storage_options=options)
    assert pd.read_parquet(f"{base}/t.parquet", storage_options=options).equals(frame)
    frame.to_parquet(f"{base}/parts", partition_cols=["b"], storage_options=options)
    again = pd.read_parquet(f"{base}/parts", storage_options=options, filters=[("b", "==", "g1")])
    assert again["a"].tolist() == [1, 3, 5, 7, 9]
    with pytest.raises(forebay.InvalidRequest, match="two names"):
        fsspec.filesystem("forebay", url=node.url, node=node.url)


def test_datasets_of_hugging_face_call_their_own_argument_url(node, scratch, tmp_path):
    datasets = pytest.importorskip("datasets")
    frame = pd.DataFrame({"a": range(10)})
    options = {"node": node.url}
    base = f"forebay://scratch/{scratch}"
    frame.to_parquet(f"{base}/t.parquet", storage_options=options)
    kept = datasets.Dataset.from_pandas(frame)
    kept.save_to_disk(f"{base}/kept", storage_options=options)
    assert datasets.load_from_disk(f"{base}/kept", storage_options=options)["a"][:] == [*range(10)]
    read = datasets.load_dataset(
        "parquet",
        data_files=f"{base}/t.parquet",
        storage_options=options,
        split="train",
        cache_dir=str(tmp_path),
    )
    assert read["a"][:] == [*range(10)]
    # It has written something of its own into the dict.
    assert pd.read_parquet(f"{base}/t.parquet", storage_options=options).equals(frame)
