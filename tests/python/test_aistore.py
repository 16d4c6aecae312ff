"""The published `aistore` client and its PyTorch datasets, unmodified, against the node."""

from __future__ import annotations

import random

import aistore.pytorch
import dataset
import pytest
import requests
import torch
from aistore.pytorch.batch_iter_dataset import AISBatchIterDataset
from aistore.sdk import Client
from aistore.sdk.enums import Colocation
from aistore.sdk.errors import AISError, ErrBckNotFound, ErrObjNotFound, ErrRemoteBckNotFound
from aistore.sdk.list_object_flag import ListObjectFlag
from aistore.sdk.obj.object_reader import ObjectReader


@pytest.fixture(scope="module")
def ais(node):
    return Client(node.url, max_pool_size=16)


@pytest.fixture(scope="module")
def train(ais):
    return ais.bucket("train", provider="s3")


class TestObjects:
    @pytest.mark.parametrize("provider", ["s3", "aws", "ais"])
    def test_reading(self, ais, objects, provider):
        obj = ais.bucket("train", provider=provider).object("img/0012.bin")
        reader = obj.get_reader()
        assert isinstance(reader, ObjectReader) and reader.read_all() == objects["img/0012.bin"]
        assert b"".join(obj.get_reader(chunk_size=100)) == objects["img/0012.bin"]
        assert reader.attributes.size == len(objects["img/0012.bin"])

    # The client puts names into URLs as they are, so it cannot request names with ?, # or %.
    @pytest.mark.parametrize("name", [n for n in dataset.ODD_NAMES if not set("?#%") & set(n)])
    def test_odd_names(self, train, objects, name):
        assert train.object(name).get_reader().read_all() == objects[name]

    @pytest.mark.parametrize("range", ["bytes=0-9", "bytes=5000000-", "bytes=-100"])
    def test_ranges(self, train, objects, range):
        first, _, last = range.removeprefix("bytes=").partition("-")
        data = objects["big/8MiB"]
        expect = (
            data[-int(last) :] if not first else data[int(first) : int(last) + 1 if last else None]
        )
        assert train.object("big/8MiB").get_reader(byte_range=range).read_all() == expect

    def test_head(self, train, objects):
        props = train.object("img/0012.bin").head(props="checksum,version,atime,custom,size,name")
        assert int(props.size) == len(objects["img/0012.bin"]) and props.present in (True, False)
        assert train.object("img/0012.bin").props.name == "img/0012.bin"

    def test_parallel_download(self, train, objects):
        with train.object("big/8MiB").get_reader(num_workers=4).read_all() as content:
            assert content.tobytes() == objects["big/8MiB"]

    def test_straight_from_the_target(self, train, objects):
        assert (
            train.object("img/0013.bin").get_reader(direct=True).read_all()
            == objects["img/0013.bin"]
        )

    def test_as_a_file(self, train, objects):
        with train.object("big/8MiB").get_reader().as_file() as file:
            assert file.read(1000) == objects["big/8MiB"][:1000]
            assert file.read() == objects["big/8MiB"][1000:]

    @pytest.mark.parametrize("shard", sorted(dataset.shards()))
    def test_members(self, train, shard):
        from aistore.sdk import ArchiveConfig

        for member in ("sample007.jpg", "dir/sub/nested.txt", "empty", "x" * 140 + ".bin"):
            assert (
                train.object(shard)
                .get_reader(archive_config=ArchiveConfig(archpath=member))
                .read_all()
                == dataset.MEMBERS[member]
            )

    def test_writing(self, ais, scratch, tmp_path, origin_s3):
        bucket = ais.bucket("scratch", provider="s3")
        (tmp_path / "file").write_bytes(dataset.noise(100_000))
        bucket.object(f"{scratch}/content").get_writer().put_content(b"content")
        bucket.object(f"{scratch}/file").get_writer().put_file(tmp_path / "file")
        assert bucket.object(f"{scratch}/content").get_reader().read_all() == b"content"
        assert origin_s3.get_object(Bucket="scratch", Key=f"{scratch}/file")[
            "Body"
        ].read() == dataset.noise(100_000)
        bucket.object(f"{scratch}/content").delete()
        with pytest.raises(ErrObjNotFound):
            bucket.object(f"{scratch}/content").get_reader().read_all()

    def test_what_is_not_there(self, ais, train):
        with pytest.raises(ErrObjNotFound):
            train.object("nope").get_reader().read_all()
        with pytest.raises(AISError) as caught:
            train.object("nope").head()
        assert caught.value.status_code == 404
        for provider, error in (("s3", ErrRemoteBckNotFound), ("ais", ErrBckNotFound)):
            with pytest.raises(error):
                ais.bucket("no-such-bucket", provider=provider).list_all_objects()


class TestBuckets:
    def test_listing(self, train, objects):
        entries = train.list_all_objects()
        assert {e.name: e.size for e in entries} == {k: len(v) for k, v in objects.items()}
        assert [e.name for e in train.list_all_objects(prefix="img/001")] == [
            f"img/001{i}.bin" for i in range(10)
        ]

    @pytest.mark.parametrize("page_size", [1, 9, 1000])
    def test_listing_by_pages(self, train, objects, page_size):
        prefix = "img/019" if page_size == 1 else "img/"
        names = [
            e.name
            for e in train.list_objects_iter(prefix=prefix, page_size=page_size, props="name")
        ]
        assert names == sorted(k for k in objects if k.startswith(prefix))
        page = train.list_objects(prefix="img/", page_size=9)
        assert len(page.entries) == 9 and page.continuation_token

    def test_listing_objects_to_read(self, train, objects):
        found = {
            o.name: o.get_reader().read_all() for o in train.list_all_objects_iter(prefix="img/000")
        }
        assert found == {k: v for k, v in objects.items() if k.startswith("img/000")}

    @pytest.mark.parametrize("shard", sorted(dataset.shards()))
    def test_listing_a_shards_members(self, train, shard):
        entries = train.list_archive(shard)
        assert sorted(e.name.removeprefix(f"{shard}/") for e in entries) == sorted(dataset.MEMBERS)
        whole = train.list_all_objects(prefix=shard, flags=[ListObjectFlag.ARCH_DIR])
        assert {e.name for e in whole} == {shard} | {f"{shard}/{m}" for m in dataset.MEMBERS}

    def test_head(self, ais, train):
        assert train.head()
        with pytest.raises((requests.HTTPError, AISError)):
            ais.bucket("no-such-bucket", provider="s3").head()

    def test_buckets_of_the_cluster(self, ais):
        names = {b.name for provider in ("", "s3") for b in ais.cluster().list_buckets(provider)}
        assert {"train", "other", "scratch"} <= names

    def test_the_cluster(self, ais):
        cluster = ais.cluster()
        assert cluster.is_ready() and cluster.get_uuid()
        smap = cluster.get_info()
        assert len(smap.tmap) == 1 and smap.proxy_si.public_net.direct_url

    def test_creating_and_destroying(self, ais):
        """Buckets are the origin's: what cannot be done here is refused, and nothing of it is
        pretended.
        """
        bucket = ais.bucket("made-by-test")
        try:
            bucket.create()
        except AISError as error:
            assert error.status_code in (400, 403, 501)
            return
        except requests.HTTPError as error:
            assert error.response.status_code in (400, 403, 501)
            return
        bucket.object("a").get_writer().put_content(b"a")
        assert [e.name for e in bucket.list_all_objects()] == ["a"]
        bucket.delete()
        with pytest.raises(ErrBckNotFound):
            bucket.list_all_objects()

    def test_put_files(self, ais, scratch, tmp_path):
        for i in range(5):
            (tmp_path / f"f{i}").write_bytes(bytes([i]) * 100)
        bucket = ais.bucket("scratch", provider="s3")
        bucket.put_files(tmp_path, prepend=f"{scratch}/")
        assert sorted(e.name for e in bucket.list_all_objects(prefix=f"{scratch}/")) == [
            f"{scratch}/f{i}" for i in range(5)
        ]


class TestBatches:
    @pytest.fixture(scope="class")
    @classmethod
    def names(cls, objects):
        names = [k for k in objects if k.startswith("img/")] + ["empty", "one", "big/chunk+1"]
        random.Random(3).shuffle(names)
        return names

    @pytest.mark.parametrize("format", [".tar", ".tgz", ".zip"])
    @pytest.mark.parametrize("streaming", [True, False])
    @pytest.mark.parametrize("only_names", [True, False])
    def test_objects(self, ais, train, objects, names, format, streaming, only_names):
        batch = ais.batch(
            names,
            bucket=train,
            output_format=format,
            streaming_get=streaming,
            only_obj_name=only_names,
        )
        got = [(info, data) for info, data in batch.get()]
        assert [info.obj_name for info, _ in got] == names
        assert [data for _, data in got] == [objects[n] for n in names]
        if not streaming:
            assert [info.size for info, _ in got] == [len(objects[n]) for n in names]
            assert all(info.bucket == "train" and info.err_msg in (None, "") for info, _ in got)

    @pytest.mark.parametrize("shard", sorted(dataset.shards()))
    @pytest.mark.parametrize("streaming", [True, False])
    def test_members(self, ais, train, shard, streaming):
        members = list(dataset.MEMBERS)
        random.Random(4).shuffle(members)
        batch = ais.batch(bucket=train, streaming_get=streaming)
        for member in members:
            batch.add(shard, archpath=member)
        got = list(batch.get())
        assert [data for _, data in got] == [dataset.MEMBERS[m] for m in members]
        assert [info.archpath for info, _ in got] == members

    @pytest.mark.parametrize("streaming", [True, False])
    def test_opaque_comes_back(self, ais, train, streaming):
        tags = [b"a", b"\xff\xfb\xef?>", b"user-id-123"]
        batch = ais.batch(bucket=train, streaming_get=streaming)
        for tag in tags:
            batch.add("one", opaque=tag)
        assert [info.opaque for info, _ in batch.get()] == tags

    @pytest.mark.parametrize("streaming", [True, False])
    def test_ranges(self, ais, train, objects, streaming):
        batch = ais.batch(bucket=train, streaming_get=streaming)
        batch.add("big/8MiB", start=1_000_000, length=2_000_000).add(
            "big/8MiB", start=8_388_600, length=-1
        )
        batch.add("shards/a.tar", archpath="sample010.jpg", start=7, length=100)
        expect = [
            objects["big/8MiB"][1_000_000:3_000_000],
            objects["big/8MiB"][8_388_600:],
            dataset.MEMBERS["sample010.jpg"][7:107],
        ]
        assert [data for _, data in batch.get()] == expect

    @pytest.mark.parametrize("streaming", [True, False])
    @pytest.mark.parametrize("format", [".tar", ".zip"])
    def test_continue_on_error(self, ais, train, objects, streaming, format):
        batch = ais.batch(
            bucket=train, streaming_get=streaming, cont_on_err=True, output_format=format
        )
        batch.add("one").add("nope").add("shards/a.tar", archpath="nope").add("img/0001.bin")
        got = list(batch.get())
        assert [data for _, data in got] == [b"1", b"", b"", objects["img/0001.bin"]]
        assert len(got) == 4 and got[1][0].obj_name == "nope"
        if not streaming:
            assert got[0][0].err_msg in (None, "") and got[1][0].err_msg and got[2][0].err_msg

    @pytest.mark.parametrize("streaming", [True, False])
    def test_without_it_the_batch_fails(self, ais, train, streaming):
        batch = ais.batch(
            ["one", "nope", "one"], bucket=train, streaming_get=streaming, cont_on_err=False
        )
        with pytest.raises((AISError, requests.RequestException, OSError)):
            list(batch.get())

    def test_several_buckets_and_colocation(self, ais, train, objects):
        batch = ais.batch(bucket=train, colocation=Colocation.TARGET_AWARE)
        batch.add("one").add("o/1", bck="other", provider="s3").add(
            ais.bucket("other", provider="aws").object("o/2")
        )
        assert [data for _, data in batch.get()] == [
            b"1",
            dataset.other()["o/1"],
            dataset.other()["o/2"],
        ]

    def test_raw(self, ais, train, objects):
        import io
        import tarfile

        raw = ais.batch(["one", "img/0001.bin"], bucket=train).get(raw=True)
        with tarfile.open(fileobj=io.BytesIO(raw.read())) as tar:
            assert [tar.extractfile(m).read() for m in tar] == [b"1", objects["img/0001.bin"]]


class TestPyTorch:
    def test_map_style(self, train, objects):
        data = aistore.pytorch.AISMapDataset(ais_source_list=train, prefix_map={train: "img/00"})
        assert len(data) == 100 and dict(data[i] for i in range(100)) == {
            k: v for k, v in objects.items() if k.startswith("img/00")
        }

    def test_parallel_map_style(self, train, objects):
        data = aistore.pytorch.AISParallelMapDataset(
            ais_source_list=train, prefix_map={train: "big/"}, num_workers=4
        )
        for i in range(len(data)):
            name, content = data[i]
            with content:
                assert content.tobytes() == objects[name]
        assert len(data) == 3

    @pytest.mark.parametrize("workers", [0, 2])
    def test_iterable(self, train, objects, workers):
        data = aistore.pytorch.AISIterDataset(ais_source_list=train, prefix_map={train: "img/"})
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers)
        assert dict(loader) == {k: v for k, v in objects.items() if k.startswith("img/")}

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("streaming", [True, False])
    def test_batches(self, ais, train, objects, workers, streaming):
        data = AISBatchIterDataset(
            train, ais, prefix_map={train: "img/"}, max_batch_size=24, streaming=streaming
        )
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers)
        assert dict(loader) == {k: v for k, v in objects.items() if k.startswith("img/")}

    def test_shard_reader(self, train):
        data = aistore.pytorch.AISShardReader(bucket_list=train, prefix_map={train: "shards/a.tar"})
        samples = dict(data)
        assert (
            samples["sample003"]["jpg"] == dataset.MEMBERS["sample003.jpg"]
            and samples["sample003"]["cls"] == dataset.MEMBERS["sample003.cls"]
        )

    def test_multi_shard_stream(self, node):
        from aistore.sdk import DataShard

        shards = [
            DataShard(node.url, "train", provider="s3", prefix=s)
            for s in ("shards/a.tar", "shards/e.zip")
        ]
        rows = list(aistore.pytorch.AISMultiShardStream(data_sources=shards))
        assert len(rows) == len(dataset.MEMBERS) and all(a == b for a, b in rows)

    def test_dynamic_batches(self, train, objects):
        data = aistore.pytorch.AISMapDataset(ais_source_list=train, prefix_map={train: "img/000"})
        sampler = aistore.pytorch.DynamicBatchSampler(data_source=data, max_batch_size=500)
        rows = [
            row
            for rows in torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=list)
            for row in rows
        ]
        assert dict(rows) == {
            k: v for k, v in objects.items() if k.startswith("img/000") and len(v) <= 500
        }
