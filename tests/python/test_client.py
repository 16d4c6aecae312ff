"""The package against a node: single objects, listings, errors, and how the node is reached."""

from __future__ import annotations

import copy
import io
import os
import pickle
from pathlib import Path

import dataset
import forebay
import numpy as np
import pytest
from servers import Node


@pytest.mark.parametrize(
    "name", ["empty", "one", "big/chunk", "big/chunk+1", "big/8MiB", "img/0100.bin"]
)
def test_get(client, objects, name):
    got = client.get(f"train/{name}")
    assert bytes(got) == objects[name] and len(got) == len(objects[name]) and got == objects[name]


@pytest.mark.parametrize("name", dataset.ODD_NAMES)
def test_odd_names(client, objects, name):
    assert bytes(client.get(("train", name))) == objects[name]
    assert bytes(client.get(name, bucket="train")) == objects[name]
    assert bytes(client.batch([name], bucket="train")[0]) == objects[name]
    assert client.head(("train", name)).size == len(objects[name])


def test_names_are_written_in_several_ways(client, objects):
    for name in ("train/one", "s3://train/one", ("train", "one")):
        assert bytes(client.get(name)) == b"1"
    assert bytes(client.get("one", bucket="train")) == b"1"
    for bad in ("train", "train/", "/one", "", "s3://train"):
        with pytest.raises(ValueError):
            client.get(bad)
    for bad in (1, None, ("a",), ("a", "b", "c"), b"train/one"):
        with pytest.raises(TypeError):
            client.get(bad)


def test_a_name_that_is_not_unicode_is_told_as_such(client):
    # As os.fsdecode has the names of files that are not UTF-8.
    bad = os.fsdecode(b"train/caf\xe9.jpg")
    for name in (bad, ("train", bad), (bad, "one")):
        for ask in (client.get, client.head, client.exists, client.delete):
            with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
                ask(name)
    with pytest.raises(TypeError, match="both str"):
        client.get(("train", 1))
    with pytest.raises(TypeError, match="not int"):
        client.get(1)


@pytest.mark.parametrize(
    ("start", "length", "expect"),
    [
        (0, 10, slice(0, 10)),
        (100, None, slice(100, None)),
        (100, -1, slice(100, None)),
        (-100, None, slice(-100, None)),
        (5, 10**9, slice(5, None)),
    ],
)
@pytest.mark.parametrize("name", ["big/chunk+1", "img/0100.bin"])
def test_ranges(client, objects, name, start, length, expect):
    assert bytes(client.get(f"train/{name}", start=start, length=length)) == objects[name][expect]


def test_a_range_across_chunks(client, objects):
    at = (1 << 20) * 3 - 1000
    assert (
        bytes(client.get("train/big/8MiB", start=at, length=2_500_000))
        == objects["big/8MiB"][at : at + 2_500_000]
    )


def test_a_timeout_that_is_none_is_told_with_its_name(client):
    batch = client.batch(["train/one"])
    for bad in (0, -1, float("nan"), float("inf")):
        for call in (
            lambda bad=bad: forebay.Client(client.url, timeout=bad),
            lambda bad=bad: batch.wait(timeout=bad),
        ):
            with pytest.raises(forebay.InvalidRequest, match="timeout="):
                call()


def test_a_range_outside_the_object_is_an_error(client):
    with pytest.raises(forebay.RangeNotSatisfiable) as told:
        client.get("train/one", start=1, length=1)
    assert str(told.value).count("train/one") == 1
    with pytest.raises(ValueError):
        client.get("train/one", start=0, length=0)


@pytest.mark.parametrize("shard", sorted(dataset.shards()))
@pytest.mark.parametrize(
    "member", sorted(dataset.MEMBERS, key=len)[::6] + ["dir/sub/nested.txt", "empty"]
)
def test_members(client, shard, member):
    assert bytes(client.get(f"train/{shard}", archpath=member)) == dataset.MEMBERS[member]


def test_what_is_not_there(client):
    for call in (
        lambda: client.get("train/nope"),
        lambda: client.head("train/nope"),
        lambda: client.get("train/shards/a.tar", archpath="nope"),
        lambda: client.get("no-such-bucket/x"),
        lambda: list(client.list("no-such-bucket")),
        lambda: client.batch(["no-such-bucket/x"]).wait(),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert isinstance(caught.value, forebay.NotFound) and caught.value.status == 404
    assert not client.exists("train/nope") and client.exists("train/one")


def test_errors_say_what_where_and_which_request(client):
    with pytest.raises(forebay.NotFound) as caught:
        client.get("train/nope")
    assert "train/nope" in str(caught.value) and caught.value.request_id
    with pytest.raises(forebay.NotFound) as of_batch:
        client.batch(["train/one", "train/nope"]).wait()
    assert "in[1] train/nope: it does not exist" in str(of_batch.value)
    with pytest.raises(forebay.NotFound) as of_bucket:
        client.batch(["s3://no-such-bucket/x"]).wait()
    assert of_bucket.value.message.startswith("no-such-bucket: ")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.status, again.request_id) == (
        str(caught.value),
        404,
        caught.value.request_id,
    )


def test_put_is_readable_at_once_here_and_at_the_origin(client, origin_s3, scratch, tmp_path):
    data = dataset.noise(3_000_000)
    path = tmp_path / "file"
    path.write_bytes(data)
    none, line = tmp_path / "none", Path("/proc/self/cmdline")
    none.touch()
    array = np.arange(1000, dtype=np.float32)
    for i, (body, expect) in enumerate(
        [
            (b"bytes", b"bytes"),
            (bytearray(b"ba"), b"ba"),
            (memoryview(data), data),
            (array, array.tobytes()),
            (array[::2], array[::2].tobytes()),
            (array.reshape(10, 100).T, array.reshape(10, 100).T.tobytes()),
            (np.empty((3, 0)), b""),
            (path, data),
            (none, b""),
            # It says that it has 0 bytes.
            (line, line.read_bytes()),
            (io.BytesIO(data), data),
            (io.BytesIO(), b""),
            (b"", b""),
        ]
    ):
        name = f"scratch/{scratch}/{i}"
        client.put(name, body)
        assert bytes(client.get(name)) == expect
        assert origin_s3.get_object(Bucket="scratch", Key=f"{scratch}/{i}")["Body"].read() == expect
    client.put(name, b"new")
    assert bytes(client.get(name)) == b"new"
    for bad in (1, None, object()):
        with pytest.raises(TypeError):
            client.put("scratch/x", bad)
    # Their memory has only where the objects are.
    objects = np.array([1, "two", None, "four"], dtype=object)
    for bad in (objects, objects[::2]):
        with pytest.raises(TypeError):
            client.put("scratch/x", bad)
    named = np.zeros(3, dtype=[("Offset", "<u4"), ("Other", "<f8")])
    client.put("scratch/x", named)
    assert bytes(client.get("scratch/x")) == named.tobytes()
    with pytest.raises(TypeError, match="binary"):
        client.put("scratch/x", io.StringIO("text"))


@pytest.mark.parametrize("size", [0, 1 << 20, (3 << 20) - 1, (3 << 20) + 1, 5 << 20])
def test_a_file_that_changes_while_it_is_put_is_not_written(
    client, scratch, tmp_path, monkeypatch, size
):
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20))

    class Changing(io.FileIO):
        def read(self, most=-1):
            os.truncate(path, size)
            return super().read(most)

    with monkeypatch.context() as patched:
        patched.setattr(io, "open", Changing)
        with pytest.raises(forebay.Conflict, match="it had 3145728 bytes at first"):
            client.put(f"scratch/{scratch}", path)
    assert not client.exists(f"scratch/{scratch}")


def test_delete(client, origin_s3, scratch):
    client.put(f"scratch/{scratch}", b"x")
    client.delete(f"scratch/{scratch}")
    assert not client.exists(f"scratch/{scratch}")
    assert "Contents" not in origin_s3.list_objects_v2(Bucket="scratch", Prefix=scratch)


def test_head(client, objects, origin_s3):
    info = client.head("train/img/0007.bin")
    there = origin_s3.head_object(Bucket="train", Key="img/0007.bin")
    assert (info.bucket, info.key, info.name, info.size) == (
        "train",
        "img/0007.bin",
        "train/img/0007.bin",
        len(objects["img/0007.bin"]),
    )
    assert info.etag == there["ETag"]
    assert info.last_modified


@pytest.mark.parametrize("page_size", [1000, 7])
def test_list_by_pages(client, objects, page_size):
    found = list(client.list("train/img/", page_size=page_size))
    assert [i.key for i in found] == sorted(k for k in objects if k.startswith("img/"))
    assert all(i.size == len(objects[i.key]) for i in found)


def test_list_a_bucket_and_buckets(client, objects):
    assert sorted(i.key for i in client.list("train")) == sorted(objects)
    assert [i.name for i in client.list("s3://train/img/001")] == [
        f"train/img/001{i}.bin" for i in range(10)
    ]
    assert list(client.list("train/nothing-begins-so")) == []
    assert {"train", "other", "scratch"} <= set(client.buckets())


def test_beside_the_node_the_unix_socket_is_found(node, client, objects):
    assert client.url == node.url and client.route == node.unix_url
    direct = forebay.Client(node.unix_url)
    assert direct.route == node.unix_url
    assert bytes(direct.get("train/img/0009.bin")) == objects["img/0009.bin"]


def test_what_is_known_of_an_object_can_be_pickled(client):
    def known(info: forebay.ObjectInfo) -> tuple:
        where = info.bucket, info.key, info.name
        return (*where, info.size, info.etag, info.last_modified, info.cache)

    for info in (client.head("train/img/0007.bin"), next(client.list("train/img/"))):
        for copied in (pickle.loads(pickle.dumps(info)), copy.deepcopy(info)):
            assert type(copied) is forebay.ObjectInfo and known(copied) == known(info)


def test_a_client_shows_no_secrets(node):
    client = forebay.Client(node.url, token="very-secret")
    assert "very-secret" not in repr(client) and b"very-secret" not in pickle.dumps(client)


def test_a_pickled_client_wants_its_token_from_the_environment(node, monkeypatch):
    pickled = pickle.dumps(forebay.Client(node.url, token="very-secret"))
    with pytest.raises(forebay.Unauthenticated, match="FOREBAY_TOKEN"):
        pickle.loads(pickled)
    monkeypatch.setenv("FOREBAY_TOKEN", "very-secret")
    assert bytes(pickle.loads(pickled).get("train/one")) == b"1"


def test_wrong_arguments():
    for url in (
        "ftp://host",
        "https://",
        "https://host/path",
        "s3://bucket",
        "http://user:pw@host",
        "http://host/path",
        "",
        "unix:relative",
    ):
        with pytest.raises(forebay.InvalidRequest):
            forebay.Client(url)
    for options in (
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"origin": "s3://x"},
        {},
    ):
        with pytest.raises(ValueError):
            forebay.Client(**options)
    with pytest.raises(ValueError):
        forebay.Client("http://127.0.0.1:1", origin="s3://x", cache="/tmp/x:1GiB")


def test_the_node_is_named_by_the_environment(node, monkeypatch):
    monkeypatch.setenv("FOREBAY_NODE", node.url)
    assert bytes(forebay.Client().get("train/one")) == b"1"


def test_tokens(origin, tmp_path):
    node = Node(origin.url, ["train"], tmp_path, options=["--set", 'auth.tokens=["right-token"]'])
    try:
        assert bytes(forebay.Client(node.url, token="right-token").get("train/one")) == b"1"
        # Who may open the node's Unix socket is trusted.
        assert bytes(forebay.Client(node.unix_url).get("train/one")) == b"1"
        for token in (None, "wrong-token"):
            client = forebay.Client(node.url, token=token)
            for call in (
                lambda: client.get("train/one"),
                lambda: client.batch(["train/one"]),
                lambda: client.put("train/x", b""),
            ):
                with pytest.raises(PermissionError) as caught:
                    call()
                assert isinstance(
                    caught.value, forebay.Unauthenticated
                ) and "wrong-token" not in str(caught.value)
    finally:
        node.stop()


class Breaks(io.RawIOBase):
    """A file that fails in the middle."""

    def __init__(self) -> None:
        self.left = 3

    def read(self, n: int = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk is gone")
        return b"x" * n


def test_a_file_that_cannot_be_read_to_its_end_leaves_nothing(client, origin_s3, scratch):
    for _ in range(10):
        with pytest.raises(OSError, match="the disk is gone"):
            client.put(f"scratch/{scratch}", Breaks())
    assert not client.exists(f"scratch/{scratch}") and "Contents" not in origin_s3.list_objects_v2(
        Bucket="scratch", Prefix=scratch
    )
