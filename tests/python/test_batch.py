"""GetBatch through the package: order, ranges, members, errors, formats, and that nothing is
copied.
"""

from __future__ import annotations

import copy
import gc
import gzip
import io
import pickle
import random
import tarfile
import zipfile

import dataset
import forebay
import numpy as np
import pyarrow
import pytest
import torch


@pytest.fixture(scope="module")
def names(objects):
    names = [k for k in objects if k.startswith(("img/", "odd/"))] + ["empty", "big/chunk", "one"]
    random.Random(dataset.SEED).shuffle(names)
    return names


def test_order_and_bytes(client, objects, names):
    batch = client.batch(names, bucket="train")
    assert len(batch) == len(names)
    for i, (item, name) in enumerate(zip(batch, names, strict=True)):
        assert (item.index, item.bucket, item.objname, item.archpath, item.error) == (
            i,
            "train",
            name,
            None,
            None,
        )
        assert item.name == f"train/{name}" and item.size == len(item) == len(objects[name])
        assert bytes(item.data) == objects[name] == bytes(item)
    assert batch.names == [f"train/{n}" for n in names]
    assert batch.sizes == [len(objects[n]) for n in names] and batch.errors == []
    assert batch.done and batch.arrived == len(names)


def test_warm_and_cold_answers_are_the_same_bytes(client, names):
    whole = [bytes(client.batch(names, bucket="train").wait()) for _ in range(2)]
    assert whole[0] == whole[1]


def test_thousands_of_batches_may_be_kept(client, objects):
    # Each reserves address space, of which a process has 128 TiB.
    kept = [client.batch(["img/0003.bin"], bucket="train")[0].data for _ in range(2500)]
    assert all(data == objects["img/0003.bin"] for data in kept)


def test_duplicates(client, objects):
    names = ["one", "img/0003.bin", "one", "one", "img/0003.bin", "empty", "empty"]
    assert [bytes(i) for i in client.batch(names, bucket="train")] == [objects[n] for n in names]


def test_several_buckets_in_every_spelling(client, objects):
    other = dataset.other()
    entries = [
        "train/one",
        "s3://other/o/1",
        ("other", "o/2"),
        ("train", "shards/a.tar", "sample003.jpg"),
        {"objname": "o/3", "bucket": "other"},
        {"objname": "other/o/4", "start": 10, "length": 5},
        forebay.Entry("o/5", bucket="other"),
        forebay.Entry("train/shards/e.zip", archpath="sample004.cls", start=10),
    ]
    expect = [
        b"1",
        other["o/1"],
        other["o/2"],
        dataset.MEMBERS["sample003.jpg"],
        other["o/3"],
        other["o/4"][10:15],
        other["o/5"],
        dataset.MEMBERS["sample004.cls"][10:],
    ]
    batch = client.batch(entries)
    assert [bytes(i) for i in batch] == expect
    assert [i.bucket for i in batch] == [
        "train",
        "other",
        "other",
        "train",
        "other",
        "other",
        "other",
        "train",
    ]
    assert (
        batch[3].archpath == "sample003.jpg" and batch[3].name == "train/shards/a.tar/sample003.jpg"
    )


@pytest.mark.parametrize("kind", ["unicode array", "object array", "generator", "tuple", "arrow"])
def test_names_come_in_arrays_and_iterables(client, objects, kind):
    names = ["one", "img/0042.bin", "odd/ünïcödé/日本語.txt"]
    made = {
        "unicode array": lambda: np.array(names),
        "object array": lambda: np.array(names, dtype=object),
        "generator": lambda: (n for n in names),
        "tuple": lambda: tuple(names),
        "arrow": lambda: pyarrow.array(names).to_numpy(zero_copy_only=False),
    }[kind]()
    assert [bytes(i) for i in client.batch(made, bucket="train")] == [objects[n] for n in names]


@pytest.mark.parametrize("shard", sorted(dataset.shards()))
def test_members_of_every_format(client, shard):
    members = list(dataset.MEMBERS)
    random.Random(1).shuffle(members)
    members += members[:5]
    batch = client.batch([("train", shard, m) for m in members])
    assert [bytes(i) for i in batch] == [dataset.MEMBERS[m] for m in members]
    assert [i.archpath for i in batch] == members


@pytest.mark.parametrize(
    "shard", [None, "shards/a.tar", "shards/b.tgz", "shards/d.tar.lz4", "shards/e.zip"]
)
def test_ranges_of_objects_and_members(client, objects, shard):
    name, whole = (
        ("big/chunk+1", objects["big/chunk+1"])
        if shard is None
        else ("sample019.jpg", dataset.MEMBERS["sample019.jpg"])
    )
    size = len(whole)
    cases = [(0, 1), (0, size), (size - 1, 1), (10, -1), (3, 100), (size - 5, 5), (size - 5, -1)]
    target = (
        {"objname": name, "bucket": "train"}
        if shard is None
        else {"objname": shard, "bucket": "train", "archpath": name}
    )
    batch = client.batch([{**target, "start": s, "length": n} for s, n in cases])
    assert [bytes(i) for i in batch] == [
        whole[s:] if n == -1 else whole[s : s + n] for s, n in cases
    ]
    with pytest.raises(forebay.Error, match="100 bytes from|broke off"):
        client.batch([{**target, "start": size - 5, "length": 100}])


def test_opaque_comes_back(client):
    batch = client.batch(
        [
            forebay.Entry("train/one", opaque=b"\xff\xfe tag"),
            forebay.Entry("train/empty", opaque="text"),
            "train/one",
        ]
    )
    assert [i.opaque for i in batch] == [b"\xff\xfe tag", b"text", None]


def test_continue_on_error_keeps_positions(client, objects):
    entries = [
        "train/one",
        "train/nope",
        ("train", "shards/a.tar", "no-such-member"),
        ("train", "no-such-shard.tar", "x"),
        {"objname": "train/one", "start": 5, "length": 1},
        "train/img/0005.bin",
    ]
    batch = client.batch(entries, continue_on_error=True)
    assert [i.error is None for i in batch] == [True, False, False, False, False, True]
    assert bytes(batch[5]) == objects["img/0005.bin"]
    assert (
        batch[1].name == "__404__/train/nope"
        and batch[2].name == "__404__/train/shards/a.tar/no-such-member"
    )
    assert batch[3].name == "__404__/train/no-such-shard.tar/x"
    assert [index for index, _ in batch.errors] == [1, 2, 3, 4]
    assert all(len(text) > 3 for _, text in batch.errors)
    with pytest.raises(LookupError):
        batch[1].data


def test_without_it_an_entry_that_fails_fails_the_batch(client):
    for bad in ("train/nope", ("train", "shards/a.tar", "nope")):
        with pytest.raises(forebay.Error):
            client.batch(["train/one", bad, "train/one"]).wait()


def test_more_failures_than_are_tolerated_fail_the_batch(client):
    with pytest.raises(forebay.Error):
        client.batch([f"train/nope{i}" for i in range(500)], continue_on_error=True).wait()


def test_what_cannot_be_an_entry(client):
    for bad, error in [
        ([], ValueError),
        (["one"], ValueError),
        ([1], TypeError),
        ([("a",)], TypeError),
        ([{"bucket": "train"}], ValueError),
        ([{"objname": "train/one", "size": 3}], ValueError),
        ("train/one", TypeError),
        (b"train/one", TypeError),
        ({"objname": "x"}, TypeError),
        (5, TypeError),
        ([{"objname": "train/../x"}], ValueError),
        ([{"objname": "train/one", "start": 2, "length": 0}], ValueError),
        ([{"objname": "train/one", "start": 0, "length": 0}], ValueError),
        ([{"objname": "train/one", "start": -1}], forebay.InvalidRequest),
        ([{"objname": "train/one", "length": -2}], forebay.InvalidRequest),
        ([forebay.Entry("train/one", length=-2)], forebay.InvalidRequest),
        ([forebay.Entry("train/one", start=0, length=0)], ValueError),
        ([forebay.Entry("one", bucket="train", length=0)], ValueError),
    ]:
        with pytest.raises(error):
            client.batch(bad).wait()
    with pytest.raises(forebay.InvalidRequest, match="start"):
        forebay.Entry("train/one", start=-1)
    with pytest.raises(TypeError, match=r"entries\[1\]"):
        client.batch(["train/one", 7])
    # The hint is told apart from the message, as that of every error.
    with pytest.raises(forebay.InvalidRequest) as told:
        client.batch(["train/one", {"objname": "train/one", "start": 0, "length": 0}])
    assert told.value.message.startswith("entries[1]: ")
    assert told.value.hint and told.value.hint not in told.value.message


def test_a_bucket_that_was_taken_from_a_name_is_told_so(client):
    for names, bucket, is_told in (
        (["img/0000.bin"], None, True),
        (["s3://img/0000.bin"], None, False),
        ([("img", "0000.bin")], None, False),
        (["0000.bin"], "img", False),
    ):
        with pytest.raises(forebay.NotFound) as told:
            client.batch(names, bucket=bucket).wait()
        assert told.value.code == "bucket_not_found"
        assert ("bucket=" in (told.value.hint or "")) is is_told


def test_indexing(client, objects):
    names = [f"img/{i:04}.bin" for i in range(30)]
    batch = client.batch(names, bucket="train")
    assert bytes(batch[-1]) == objects[names[-1]] and bytes(batch[29]) == objects[names[29]]
    assert [i.objname for i in batch[5:20:4]] == names[5:20:4] and [
        i.objname for i in batch[::-1]
    ] == names[::-1]
    for bad in (30, -31):
        with pytest.raises(IndexError):
            batch[bad]
    with pytest.raises(TypeError):
        batch["x"]
    assert sum(1 for _ in batch) == sum(1 for _ in batch) == 30


def address(buffer) -> int:
    return np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]


def test_views_are_not_copies(client, objects):
    names = [f"img/{i:04}.bin" for i in range(100)]
    batch = client.batch(names, bucket="train").wait()
    begin, end = address(batch), address(batch) + memoryview(batch).nbytes
    for item in batch:
        assert begin < address(item) and address(item) + item.size <= end
        assert (
            address(item)
            == address(item.data)
            == torch.frombuffer(item, dtype=torch.uint8).data_ptr()
        )
    # A member of a tar lies at a multiple of 512 bytes from the buffer's beginning, which is a
    # page's: aligned for every type.
    assert all(address(item) % 512 == 0 for item in batch)


def test_views_keep_the_memory_and_may_be_written(client, objects, recwarn):
    view = np.frombuffer(client.batch(["img/0150.bin"], bucket="train")[0], np.uint8)
    tensor = torch.frombuffer(client.batch(["img/0151.bin"], bucket="train")[0], dtype=torch.uint8)
    for _ in range(20):
        client.batch([f"img/{i:04}.bin" for i in range(100)], bucket="train").wait()
    gc.collect()
    assert (
        view.tobytes() == objects["img/0150.bin"]
        and tensor.numpy().tobytes() == objects["img/0151.bin"]
    )
    view[0] ^= 255
    tensor[0] = 7
    assert bytes(client.get("train/img/0150.bin")) == objects["img/0150.bin"]
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_memory_is_used_again(client):
    names = [f"img/{i:04}.bin" for i in range(200)]
    seen = {address(client.batch(names, bucket="train").wait()) for _ in range(10)}
    assert len(seen) < 5
    held = [client.batch(names, bucket="train").wait() for _ in range(10)]
    assert len({address(b) for b in held}) == 10


def test_batches_are_handed_out_in_order(client, objects):
    lists = [[f"img/{(i * 7 + j) % 200:04}.bin" for j in range(1 + i % 9)] for i in range(40)]
    for prefetch in (0, 1, 3, 100):
        got = [
            [bytes(i) for i in batch]
            for batch in client.batches(lists, bucket="train", prefetch=prefetch)
        ]
        assert got == [[objects[n] for n in names] for names in lists]


def test_a_bad_list_fails_in_its_place(client):
    batches = client.batches([["train/one"], ["train/one"], [5], ["train/one"]], prefetch=3)
    assert bytes(next(batches)[0]) == b"1" and bytes(next(batches)[0]) == b"1"
    with pytest.raises(TypeError):
        next(batches)


def test_an_iterator_that_raises_fails_in_its_place(client):
    def lists():
        yield ["train/one"]
        raise RuntimeError("no more")

    batches = client.batches(lists(), prefetch=2)
    assert bytes(next(batches)[0]) == b"1"
    with pytest.raises(RuntimeError, match="no more"):
        next(batches)


def test_prefetching_runs_ahead_by_so_many(client):
    taken = []

    def lists():
        for i in range(10):
            taken.append(i)
            yield ["train/one"]

    batches = client.batches(lists(), prefetch=3)
    next(batches)
    assert len(taken) == 4
    assert len(list(batches)) == 9


@pytest.mark.parametrize("format", ["tar", "tgz", "tar.lz4", "zip"])
@pytest.mark.parametrize("only_names", [False, True])
def test_archives_of_every_format(client, objects, format, only_names):
    names = ["one", "img/0010.bin", "empty", "odd/ünïcödé/日本語.txt", dataset.ODD_NAMES[-1]]
    data = bytes(client.archive(names, format, bucket="train", only_names=only_names))
    expect = [(n if only_names else f"train/{n}", objects[n]) for n in names]
    if format == "zip":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            assert all(i.compress_type == zipfile.ZIP_STORED for i in archive.infolist())
            got = [(i.filename, archive.read(i)) for i in archive.infolist()]
    else:
        if format == "tgz":
            data = gzip.decompress(data)
        elif format == "tar.lz4":
            data = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "lz4").read()
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            got = [(m.name, archive.extractfile(m).read()) for m in archive]
            assert all(m.mode == 0o644 and m.uid == 0 for m in archive.getmembers())
    assert got == expect


def test_many_entries(client, objects):
    rng = random.Random(5)
    names = [f"img/{rng.randrange(200):04}.bin" for _ in range(20_000)]
    batch = client.batch(names, bucket="train")
    assert all(len(i) == len(objects[n]) for i, n in zip(batch, names, strict=True))
    for k in rng.sample(range(20_000), 200):
        assert bytes(batch[k]) == objects[names[k]]


def test_a_batch_larger_than_the_reads_ahead(client, objects):
    names = ["big/8MiB", "big/chunk", "big/8MiB", "big/chunk+1"] * 4
    for item, name in zip(client.batch(names, bucket="train"), names, strict=True):
        assert item.data == objects[name]


def test_a_copy_of_an_item_is_bytes(client, objects):
    ok, failed = client.batch(["train/img/0001.bin", "train/nope"], continue_on_error=True)
    for copied in (pickle.loads(pickle.dumps(ok)), copy.deepcopy(ok), copy.copy(ok)):
        assert type(copied) is bytes and copied == objects["img/0001.bin"]
    with pytest.raises(forebay.EntryFailed):
        pickle.dumps(failed)


def test_an_item_is_compared_by_its_bytes(client, objects):
    names = ["train/one", "train/img/0001.bin", "train/one", "train/nope", "train/empty"]
    one, other, again, failed, empty = client.batch(names, continue_on_error=True)
    assert one == objects["one"] == one and one == bytearray(objects["one"])
    assert one == again == client.get("train/one") == one
    assert one != other and one != objects["one"] + b"x" and one != "1" and one != 1
    assert empty == b"" and empty != one
    assert failed == failed and failed != b"" and failed != empty and empty != failed
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_an_entry_shows_all_that_it_was_given():
    for name, given in (
        ("o", {}),
        ("o", {"bucket": "b", "archpath": "a/b.txt"}),
        ("o", {"start": 0, "length": -1, "opaque": b"\xff' tag"}),
        ('it\'s "o"\\\x7f\u0301', {"archpath": "a\x1b\u200b'"}),
    ):
        entry = forebay.Entry(name, **given)
        again = eval(repr(entry), {"Entry": forebay.Entry})
        assert again.__getnewargs_ex__() == entry.__getnewargs_ex__()


def test_repr(client):
    batch = client.batch(["train/one"]).wait()
    size = f"{batch.nbytes:,} bytes"
    assert repr(batch) == f"<forebay.Batch of 1 entry, 1 arrived, {size}, complete>"
    assert repr(batch[0]) == '<forebay.Item 0 "train/one", 1 byte>'
    assert repr(client.get("train/one")) == "<forebay.Buffer of 1 byte>"
    assert repr(client.batch(["train/one"] * 2).wait()).startswith("<forebay.Batch of 2 entries, ")
    batches = client.batches([["train/one"]] * 2, prefetch=1)
    assert repr(batches) == "<forebay.Batches: 0 requested ahead, more to be requested>"
    assert list(map(len, batches)) == [1, 1]
    assert repr(batches) == "<forebay.Batches: 0 requested ahead, nothing more to be requested>"
