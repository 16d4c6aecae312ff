"""s3fs, s3torchconnector, obstore and PyArrow's S3, unmodified, against the S3 front."""

from __future__ import annotations

import dataset
import numpy as np
import obstore
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet
import pytest
import s3fs
import torch
from obstore.store import S3Store
from s3torchconnector import S3Checkpoint, S3IterableDataset, S3MapDataset
from servers import ACCESS_KEY, REGION, SECRET_KEY


class TestS3fs:
    @pytest.fixture(scope="class")
    @classmethod
    def fs(cls, node):
        return s3fs.S3FileSystem(
            endpoint_url=node.url, key=ACCESS_KEY, secret=SECRET_KEY, skip_instance_cache=True
        )

    def test_reading(self, fs, objects):
        assert fs.cat_file("train/img/0050.bin") == objects["img/0050.bin"]
        with fs.open("train/big/8MiB") as file:
            file.seek(3_000_000)
            assert file.read(1_000_000) == objects["big/8MiB"][3_000_000:4_000_000]
        names = [f"train/img/{i:04}.bin" for i in range(40)]
        assert fs.cat(names) == {n: objects[n.removeprefix("train/")] for n in names}
        for name in dataset.ODD_NAMES:
            assert fs.cat_file(f"train/{name}") == objects[name]

    def test_a_file_that_is_overwritten_while_it_is_open(self, fs, scratch):
        fs.pipe_file(f"scratch/{scratch}", b"a" * 3_000_000)
        with fs.open(f"scratch/{scratch}", block_size=1 << 20) as file:
            assert file.read(10) == b"a" * 10
            fs.pipe_file(f"scratch/{scratch}", b"b" * 3_000_000)
            file.seek(2_500_000)
            with pytest.raises(s3fs.utils.FileExpired):
                file.read(10)

    def test_a_range_past_the_end_is_told_in_s3s_sentence(self, fs):
        """By which Zarr, above s3fs, knows that there is nothing to read."""
        with pytest.raises(OSError, match="The requested range is not satisfiable: train/one"):
            fs.cat_file("train/one", start=100_000)

    def test_looking(self, fs, objects):
        assert sorted(fs.find("train/img")) == sorted(
            f"train/{k}" for k in objects if k.startswith("img/")
        )
        assert fs.info("train/img/0001.bin")["size"] == len(objects["img/0001.bin"]) and fs.isdir(
            "train/img"
        )
        assert not fs.exists("train/nope")
        with pytest.raises(FileNotFoundError):
            fs.cat_file("train/nope")

    def test_writing(self, fs, scratch):
        data = dataset.noise(12_000_000)
        with fs.open(f"scratch/{scratch}/multi", "wb", block_size=5 << 20) as file:
            file.write(data)
        fs.pipe_file(f"scratch/{scratch}/small", b"small")
        fs.copy(f"scratch/{scratch}/small", f"scratch/{scratch}/copy")
        assert (
            fs.cat_file(f"scratch/{scratch}/multi") == data
            and fs.cat_file(f"scratch/{scratch}/copy") == b"small"
        )
        fs.rm(f"scratch/{scratch}", recursive=True)
        fs.invalidate_cache()
        assert fs.find(f"scratch/{scratch}") == []


class TestS3TorchConnector:
    """AWS's connector is built on its C runtime, which reads big objects by parallel ranges and
    uploads in chunks with trailers.
    """

    @pytest.fixture(autouse=True)
    def options(self, node):
        from s3torchconnector import S3ClientConfig

        self.options = {
            "region": REGION,
            "endpoint": node.url,
            "s3client_config": S3ClientConfig(force_path_style=True),
        }

    def test_map_style(self, objects):
        data = S3MapDataset.from_prefix("s3://train/img/", **self.options)
        assert len(data) == 200
        assert {data[i].key: data[i].read() for i in (0, 5, 199)} == {
            k: objects[k] for k in ("img/0000.bin", "img/0005.bin", "img/0199.bin")
        }

    def test_a_big_object(self, objects):
        data = S3MapDataset.from_objects(
            ["s3://train/big/8MiB", "s3://train/empty"], **self.options
        )
        assert data[0].read() == objects["big/8MiB"] and data[1].read() == b""

    def test_iterable_with_workers(self, objects):
        data = S3IterableDataset.from_prefix(
            "s3://train/img/", transform=key_and_bytes, enable_sharding=True, **self.options
        )
        loader = torch.utils.data.DataLoader(
            data, batch_size=None, num_workers=2, multiprocessing_context="spawn"
        )
        assert dict(loader) == {k: v for k, v in objects.items() if k.startswith("img/")}

    def test_checkpoints(self, scratch):
        checkpoint = S3Checkpoint(**self.options)
        state = {"weights": torch.arange(3_000_000, dtype=torch.float32)}
        with checkpoint.writer(f"s3://scratch/{scratch}") as writer:
            torch.save(state, writer)
        with checkpoint.reader(f"s3://scratch/{scratch}") as reader:
            assert torch.equal(torch.load(reader)["weights"], state["weights"])


def key_and_bytes(item):
    return item.key, item.read()


class TestObstore:
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, node):
        options = {
            "endpoint": node.url,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "region": REGION,
        }
        return lambda bucket: S3Store(
            bucket,
            client_options={"allow_http": True},
            virtual_hosted_style_request=False,
            **options,
        )

    def test_reading(self, store, objects):
        train = store("train")
        assert bytes(obstore.get(train, "img/0033.bin").bytes()) == objects["img/0033.bin"]
        big = objects["big/8MiB"]
        assert (
            bytes(obstore.get_range(train, "big/8MiB", start=7, end=5_000_000)) == big[7:5_000_000]
        )
        ranges = obstore.get_ranges(
            train, "big/8MiB", starts=[0, 100, 8_000_000], ends=[10, 4_000_000, 8_388_608]
        )
        assert [bytes(r) for r in ranges] == [big[0:10], big[100:4_000_000], big[8_000_000:]]
        assert obstore.head(train, "one")["size"] == 1
        with pytest.raises(FileNotFoundError):
            obstore.head(train, "nope")

    def test_listing(self, store, objects):
        train = store("train")
        listed = {
            meta["path"]: meta["size"]
            for page in obstore.list(train, prefix="img")
            for meta in page
        }
        assert listed == {k: len(v) for k, v in objects.items() if k.startswith("img/")}
        assert "img" in obstore.list_with_delimiter(train)["common_prefixes"]

    def test_writing(self, store, scratch):
        bucket, data = store("scratch"), dataset.noise(12_000_000)
        obstore.put(bucket, f"{scratch}/multi", data, use_multipart=True, chunk_size=5 << 20)
        obstore.put(bucket, f"{scratch}/small", b"small")
        with pytest.raises(obstore.exceptions.AlreadyExistsError):
            obstore.put(bucket, f"{scratch}/small", b"other", mode="create")
        obstore.copy(bucket, f"{scratch}/small", f"{scratch}/copy")
        obstore.rename(bucket, f"{scratch}/copy", f"{scratch}/renamed")
        assert bytes(obstore.get(bucket, f"{scratch}/multi").bytes()) == data
        assert bytes(obstore.get(bucket, f"{scratch}/renamed").bytes()) == b"small"
        obstore.delete(bucket, [f"{scratch}/{n}" for n in ("multi", "small", "renamed")])
        assert [page for page in obstore.list(bucket, prefix=scratch) if len(page)] == []


class TestPyArrow:
    @pytest.fixture(scope="class")
    @classmethod
    def fs(cls, node):
        return pa.fs.S3FileSystem(
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            endpoint_override=node.url.removeprefix("http://"),
            scheme="http",
            region=REGION,
        )

    def test_reading(self, fs, objects):
        with fs.open_input_file("train/big/8MiB") as file:
            assert (
                file.size() == 8 << 20
                and file.read_at(1000, 5_000_000) == objects["big/8MiB"][5_000_000:5_001_000]
            )
        with fs.open_input_stream("train/img/0044.bin") as stream:
            assert stream.read() == objects["img/0044.bin"]
        infos = fs.get_file_info(pa.fs.FileSelector("train/img"))
        assert {i.base_name: i.size for i in infos} == {
            k.removeprefix("img/"): len(v) for k, v in objects.items() if k.startswith("img/")
        }
        assert fs.get_file_info("train/nope").type == pa.fs.FileType.NotFound
        assert fs.get_file_info("train/img").type == pa.fs.FileType.Directory

    def test_directories_of_a_node_over_a_directory(self, tables):
        """PyArrow writes an empty object for a directory: where it makes one, and where one may
        have lost its last file. There is nothing to write here, and nothing that fails.
        """
        local = pa.fs.S3FileSystem(
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            endpoint_override=tables.url.removeprefix("http://"),
            scheme="http",
            region=REGION,
        )
        table = pa.table({"a": [1, 2, 3], "g": [1, 1, 2]})
        pa.dataset.write_dataset(
            table, "tables/made", filesystem=local, format="parquet", partitioning=["g"]
        )
        assert pa.dataset.dataset("tables/made", filesystem=local).count_rows() == 3
        found = local.get_file_info(pa.fs.FileSelector("tables/made", recursive=True))
        for info in found:
            if info.is_file:
                local.delete_file(info.path)
        assert local.get_file_info("tables/made").type == pa.fs.FileType.NotFound
        with local.open_output_stream("tables/made/x") as file:
            file.write(b"1")
        local.move("tables/made/x", "tables/made/y")
        local.delete_dir("tables/made")
        assert local.get_file_info("tables/made").type == pa.fs.FileType.NotFound

    def test_a_parquet_dataset(self, fs, scratch):
        table = pa.table({"x": np.arange(200_000), "part": np.arange(200_000) % 4})
        pa.dataset.write_dataset(
            table, f"scratch/{scratch}", filesystem=fs, format="parquet", partitioning=["part"]
        )
        back = pa.dataset.dataset(
            f"scratch/{scratch}", filesystem=fs, format="parquet", partitioning=["part"]
        )
        assert (
            back.count_rows() == 200_000
            and back.to_table(columns=["x"]).column("x").to_numpy().sum()
            == table["x"].to_numpy().sum()
        )

    def test_nested_directories_are_removed(self, fs, scratch):
        """PyArrow names files and their directories in one request; what keeps objects as files, as
        the origin here does, removes only directories that are empty.
        """
        for _ in range(10):
            for name in ("a/b/c", "a/d", "e"):
                with fs.open_output_stream(f"scratch/{scratch}/{name}") as stream:
                    stream.write(b"x")
            fs.delete_dir(f"scratch/{scratch}")
            assert fs.get_file_info(f"scratch/{scratch}").type == pa.fs.FileType.NotFound

    def test_writing(self, fs, scratch):
        data = dataset.noise(11_000_000)
        with fs.open_output_stream(f"scratch/{scratch}/multi") as stream:
            stream.write(data)
        fs.copy_file(f"scratch/{scratch}/multi", f"scratch/{scratch}/copy")
        fs.move(f"scratch/{scratch}/copy", f"scratch/{scratch}/moved")
        with fs.open_input_file(f"scratch/{scratch}/moved") as file:
            assert file.read() == data
        fs.delete_dir_contents(f"scratch/{scratch}")
        assert fs.get_file_info(f"scratch/{scratch}/multi").type == pa.fs.FileType.NotFound
