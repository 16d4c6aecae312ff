"""What AIStore's clients do beyond reading: buckets, appends, `latest`, checksums, its S3 root,
views of the cluster, uploads in parts; by the published `aistore` client where it can ask."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import boto3
import dataset
import pytest
import requests
from aistore.sdk import Client
from aistore.sdk.archive_config import ArchiveConfig, ArchiveMode
from aistore.sdk.errors import (
    AISError,
    ErrBckAlreadyExists,
    ErrBckNotFound,
    ErrObjNotFound,
    InvalidBckProvider,
)
from aistore.sdk.list_object_flag import ListObjectFlag
from botocore.config import Config
from servers import ACCESS_KEY, REGION, SECRET_KEY, Node


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A node in front of a directory of buckets."""
    root = tmp_path_factory.mktemp("directories")
    (root / "buckets").mkdir()
    node = Node("", [], root / "node", options=["--origin", f"file://{root / 'buckets'}/*"])
    yield node
    node.stop()


@pytest.fixture(scope="module")
def wild(origin, tmp_path_factory):
    """A node in front of all buckets of an S3 server."""
    options = ["--origin", f"s3://?endpoint={origin.url}&region={REGION}"]
    node = Node("", [], tmp_path_factory.mktemp("wild"), options=options)
    yield node
    node.stop()


@pytest.fixture(params=["local", "wild"])
def ais(request):
    """A client of a node that can make buckets."""
    return Client(request.getfixturevalue(request.param).url)


@pytest.fixture
def bucket(ais):
    bucket = ais.bucket(f"b-{uuid.uuid4().hex[:12]}").create()
    yield bucket
    bucket.delete(missing_ok=True)


def locked(directory, keys: str) -> Node:
    """A node before a directory of buckets, one of which is `data`, that asks who one is."""
    (directory / "b" / "data").mkdir(parents=True)
    (directory / "keys.toml").write_text(keys)
    (directory / "keys.toml").chmod(0o600)
    options = ["--set", f"auth.keys_file={directory / 'keys.toml'}"]
    return Node(
        "", [], directory / "node", options=[*options, "--origin", f"file://{directory}/b/*"]
    )


def put(bucket, name: str, data: bytes):
    return bucket.object(name).get_writer().put_content(data)


def read(bucket, name: str, **options) -> bytes:
    return bucket.object(name).get_reader(**options).read_all()


class TestBuckets:
    def test_made_and_destroyed_with_what_is_in_them(self, ais, bucket):
        with pytest.raises(ErrBckAlreadyExists):
            ais.bucket(bucket.name).create()
        ais.bucket(bucket.name).create(exist_ok=True)
        for i in range(40):
            put(bucket, f"dir{i % 3}/{i}", b"x")
        assert read(bucket, "dir1/1") == b"x"
        bucket.delete()
        with pytest.raises(ErrBckNotFound):
            bucket.list_all_objects()
        with pytest.raises(ErrBckNotFound):
            bucket.delete()
        bucket.create()
        assert bucket.list_all_objects() == []
        # Nothing from before is in the cache.
        with pytest.raises(ErrObjNotFound):
            read(bucket, "dir1/1")

    def test_what_is_configured_stays(self, node):
        train = Client(node.url).bucket("scratch")
        put(train, "stays", b"1")
        # The bucket of an S3 origin that is configured by its name is not emptied, either, by a
        # client that means AIStore's own list of buckets.
        for provider in ("aws", "s3"):
            answer = requests.delete(
                f"{node.url}/v1/buckets/scratch?provider={provider}",
                json={"action": "destroy-bck"},
            )
            assert answer.status_code == 501 and "ais://" in answer.json()["hint"]
        assert read(train, "stays") == b"1"

    def test_listed_by_their_provider(self, local, wild, bucket):
        for node, kind, other in ((local, "ais", "aws"), (wild, "aws", "ais")):
            cluster = Client(node.url).cluster()
            found = {b.name: b.provider for b in cluster.list_buckets("")}
            assert set(found.values()) <= {kind}
            assert {b.name for b in cluster.list_buckets(kind)} == set(found)
            assert cluster.list_buckets(other) == []
        assert bucket.name in {
            b.name for n in (local, wild) for b in Client(n.url).cluster().list_buckets("")
        }

    def test_jobs_over_many_objects_are_refused_by_name(self, ais, bucket):
        put(bucket, "a", b"1")
        group = bucket.objects(obj_names=["a"])
        for name, action in (
            ("delete-listrange", group.delete),
            ("prefetch-listrange", group.prefetch),
            ("evict-listrange", group.evict),
            ("copy-listrange", lambda: group.copy(ais.bucket("elsewhere"))),
            ("copy-bck", lambda: bucket.copy(ais.bucket("elsewhere"))),
            ("move-bck", lambda: bucket.rename("elsewhere")),
            ("archive", lambda: group.archive("all.tar")),
            ("create-inventory", bucket.create_inventory),
            ("show-inventory", bucket.show_inventory),
            ("destroy-inventory", bucket.destroy_inventory),
        ):
            try:
                action()
            except AISError as error:
                assert error.status_code == 501 and name in error.message, error
                assert "hint" in error.message
            except InvalidBckProvider:
                continue  # refused by the client itself
            else:
                raise AssertionError(f"{name} was not refused")
        assert read(bucket, "a") == b"1"

    def test_summary_and_info(self, bucket):
        for i in range(5):
            put(bucket, f"a/{i}", b"x" * (10 + i))
        put(bucket, "b", b"y" * 100)
        summary = bucket.summary(cached=False)
        count, sizes = summary["ObjCount"], summary["ObjSize"]
        assert int(count["obj_count_present"]) + int(count["obj_count_remote"]) >= 6
        assert (sizes["obj_min_size"], sizes["obj_max_size"]) == (10, 100)
        props, summary = bucket.info(prefix="a/")
        assert "provider" in props and summary["ObjSize"]["obj_max_size"] == 14

    def test_listings(self, bucket, local, ais):
        put(bucket, "a", b"12345")
        put(bucket, "b", b"")
        named = bucket.list_all_objects(flags=[ListObjectFlag.NAME_ONLY])
        assert [(e.name, e.size) for e in named] == [("a", 0), ("b", 0)]
        full = bucket.list_all_objects(props="name,size,checksum,version")
        assert [(e.name, e.size) for e in full] == [("a", 5), ("b", 0)]
        assert all(e.version for e in full)
        read(bucket, "a")
        read(bucket, "b")
        everything = bucket.list_all_objects()
        assert all(e.is_cached() for e in everything)
        cached = bucket.list_all_objects(flags=[ListObjectFlag.CACHED])
        assert [e.name for e in cached] == ["a", "b"]
        assert bucket.list_all_objects(flags=[ListObjectFlag.NOT_CACHED]) == []

    def test_fields_in_any_case(self, node):
        answer = requests.post(
            f"{node.url}/v1/ml/moss/train",
            json={"IN": [{"ObjName": "one", "unknown": {}}], "Strm": True, "mime": "tar", "x": 1},
        )
        assert answer.status_code == 200, answer.text


class TestAppend:
    def test_as_file(self, bucket):
        with bucket.object("log").get_writer().as_file(mode="w") as file:
            for i in range(100):
                file.write(b"%03d\n" % i)
        assert read(bucket, "log") == b"".join(b"%03d\n" % i for i in range(100))
        with bucket.object("log").get_writer().as_file(mode="a") as file:
            file.write(b"more\n")
            file.flush()
            assert read(bucket, "log").endswith(b"099\nmore\n")
            file.write(b"and more\n")
        assert read(bucket, "log").endswith(b"099\nmore\nand more\n")
        with bucket.object("new").get_writer().as_file() as file:
            file.write(b"x")
        assert read(bucket, "new") == b"x"

    def test_large(self, bucket):
        data = bytes(range(256)) * (20 << 12)
        writer = bucket.object("large").get_writer()
        handle = ""
        for start in range(0, len(data), 3_000_001):
            handle = writer.append_content(data[start : start + 3_000_001], handle=handle)
        with pytest.raises(ErrObjNotFound):
            read(bucket, "large")
        writer.append_content(b"", handle=handle, flush=True)
        assert hashlib.md5(read(bucket, "large")).digest() == hashlib.md5(data).digest()
        # What was flushed can be flushed again, but not appended to.
        writer.append_content(b"", handle=handle, flush=True)
        with pytest.raises(AISError):
            writer.append_content(b"x", handle=handle)

    def test_an_append_that_is_sent_twice_counts_once(self, bucket):
        writer = bucket.object("twice").get_writer()
        first = writer.append_content(b"one ")
        second = writer.append_content(b"two ", handle=first)
        assert writer.append_content(b"two ", handle=first) == second
        with pytest.raises(AISError) as caught:
            writer.append_content(b"three", handle=first)
        assert caught.value.status_code == 409
        writer.append_content(b"", handle=second, flush=True)
        assert read(bucket, "twice") == b"one two "

    def test_an_append_that_breaks_off_does_not_count(self, bucket):
        writer = bucket.object("broken").get_writer()
        handle = writer.append_content(b"kept ")

        def body():
            yield b"lost" * (3 << 20)
            raise OSError("the client is gone")

        with pytest.raises(OSError):
            writer.append_content(body(), handle=handle)
        deadline = time.monotonic() + 30
        while True:
            try:
                handle = writer.append_content(b"and this", handle=handle)
                break
            except AISError as error:  # the node has not noticed yet that its client left
                assert error.status_code == 409 and time.monotonic() < deadline
                time.sleep(0.1)
        writer.append_content(b"", handle=handle, flush=True)
        assert read(bucket, "broken") == b"kept and this"

    def test_invalid_append_handles(self, bucket):
        writer = bucket.object("x").get_writer()
        other = bucket.object("y").get_writer().append_content(b"y")
        for handle, status in (("nonsense", 400), ("0-0", 404), (other, 404)):
            with pytest.raises(AISError) as caught:
                writer.append_content(b"x", handle=handle)
            assert caught.value.status_code == status

    def test_needs_the_right_to_write(self, tmp_path):
        node = locked(
            tmp_path,
            """
[[keys]]
access_key = "reader"
secret_key = "secret-of-reader"
token = "token-of-reader"
[[keys.allow]]
bucket = "data"
actions = ["read", "list"]
[[keys]]
access_key = "writer"
secret_key = "secret-of-writer"
token = "token-of-writer"
[[keys.allow]]
bucket = "data"
actions = ["read", "list", "write"]
""",
        )
        try:
            reader = Client(node.url, token="token-of-reader")
            writer = Client(node.url, token="token-of-writer")
            with pytest.raises(AISError) as caught:
                reader.bucket("data").object("o").get_writer().append_content(b"x")
            assert caught.value.status_code == 403
            handle = writer.bucket("data").object("o").get_writer().append_content(b"x")
            for client in (reader, writer):
                for action in (
                    lambda c=client: c.bucket("made").create(),
                    lambda c=client: c.bucket("data").delete(),
                ):
                    with pytest.raises(AISError) as caught:
                        action()
                    assert caught.value.status_code == 403
            with pytest.raises(AISError) as caught:
                reader.bucket("data").object("o").get_writer().append_content(
                    b"", handle=handle, flush=True
                )
            assert caught.value.status_code == 403
        finally:
            node.stop()


class TestVersions:
    def test_latest_is_for_all_who_read_after_it(self, node, origin_s3, scratch):
        bucket = Client(node.url).bucket("scratch", provider="s3")
        name = f"{scratch}/object"
        origin_s3.put_object(Bucket="scratch", Key=name, Body=b"first")
        assert read(bucket, name) == b"first"
        origin_s3.put_object(Bucket="scratch", Key=name, Body=b"second")
        assert read(bucket, name) == b"first", "within its freshness"
        assert read(bucket, name, latest=True) == b"second"
        assert read(bucket, name) == b"second"
        batch = Client(node.url).batch([name], bucket=bucket)
        assert [data for _, data in batch.get()] == [b"second"]
        s3 = requests.get(f"{node.url}/scratch/{name}")
        assert s3.content == b"second" and s3.headers["x-cache"] == "HIT"

    @pytest.mark.parametrize("how", ["latest-ver", "no-cache"])
    def test_members_of_the_latest(self, node, origin_s3, scratch, how):
        def shard(content: bytes) -> bytes:
            file = io.BytesIO()
            with tarfile.open(fileobj=file, mode="w") as tar:
                info = tarfile.TarInfo("m")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            return file.getvalue()

        # Without an extension: its first bytes show what it is.
        name = f"{scratch}/shard"
        url = f"{node.url}/v1/objects/scratch/{name}?archpath=/m"
        origin_s3.put_object(Bucket="scratch", Key=name, Body=shard(b"first"))
        assert requests.get(url).content == b"first"
        origin_s3.put_object(Bucket="scratch", Key=name, Body=shard(b"the second"))
        assert requests.get(url).content == b"first"
        if how == "latest-ver":
            answer = requests.get(url + "&latest-ver=true")
        else:
            answer = requests.get(url, headers={"Cache-Control": "no-cache"})
        assert answer.content == b"the second"
        assert requests.get(url).content == b"the second"
        bucket = Client(node.url).bucket("scratch", provider="s3")
        member = ArchiveConfig(archpath="m")
        assert read(bucket, name, archive_config=member) == b"the second"

    def test_head_is_of_one_version(self, node, origin_s3, scratch):
        name = f"{scratch}/object"
        url = f"{node.url}/v1/objects/scratch/{name}"
        origin_s3.put_object(Bucket="scratch", Key=name, Body=b"first")
        assert requests.get(url).content == b"first"
        origin_s3.put_object(Bucket="scratch", Key=name, Body=b"second one")
        for query in ("?latest-ver=true", "?latest-ver=true&props=version,checksum,size"):
            head = requests.head(url + query)
            assert head.headers["ais-version"] == head.headers["etag"].strip('"')
            assert head.headers["content-length"] == "10"
            assert head.headers["ais-checksum-value"] == hashlib.md5(b"second one").hexdigest()

    def test_checksums_are_told(self, wild):
        bucket = Client(wild.url).bucket("scratch", provider="s3")
        md5 = hashlib.md5(b"content").hexdigest()
        assert put(bucket, "sum", b"content").headers["ais-checksum-value"] == md5
        props = bucket.object("sum").props
        assert (props.checksum_type, props.checksum_value) == ("md5", md5)
        (entry,) = bucket.list_all_objects(prefix="sum", props="name,checksum")
        assert entry.checksum == md5

    def test_errors_are_of_the_classes_that_clients_know(self, ais, bucket):
        for missing in (bucket.object("no").get_reader().read_all, bucket.object("no").delete):
            with pytest.raises(ErrObjNotFound) as caught:
                missing()
            assert "does not exist" in caught.value.message
        put(bucket, "yes", b"1")
        batch = ais.batch(["yes", "no"], bucket=bucket, cont_on_err=False)
        with pytest.raises(ErrObjNotFound) as caught:
            list(batch.get())
        assert "in[1]" in caught.value.message and "does not exist" in caught.value.message
        with pytest.raises(ErrBckNotFound) as caught:
            list(ais.batch(["x"], bucket=ais.bucket("nowhere")).get())
        assert "does not exist" in caught.value.message


class TestCustomProperties:
    @staticmethod
    def custom(bucket, name: str) -> dict[str, str]:
        return bucket.object(name).head("custom").custom_metadata

    def test_custom_properties(self, bucket):
        data = dataset.noise(3 << 20)
        put(bucket, "o", data)
        assert read(bucket, "o") == data
        assert self.custom(bucket, "o") == {}
        writer = bucket.object("o").get_writer()
        writer.set_custom_props({"label": "cat", "run": "7 of=9"})
        assert self.custom(bucket, "o") == {"label": "cat", "run": "7 of=9"}
        writer.set_custom_props({"label": "dog"})
        assert self.custom(bucket, "o") == {"label": "dog", "run": "7 of=9"}
        assert bucket.object("o").props.custom_metadata == {"label": "dog", "run": "7 of=9"}
        writer.set_custom_props({"only": "x"}, replace_existing=True)
        assert self.custom(bucket, "o") == {"only": "x"}
        assert read(bucket, "o") == data
        writer.set_custom_props({}, replace_existing=True)
        assert self.custom(bucket, "o") == {}
        assert read(bucket, "o") == data

    def test_each_property_has_a_header(self, request, bucket):
        """As in AIStore, whose Go client takes each header for one property."""
        put(bucket, "o", b"bytes")
        bucket.object("o").get_writer().set_custom_props({"one": "1", "two": "2"})
        url = request.getfixturevalue(request.node.callspec.params["ais"]).url
        answer = requests.head(f"{url}/v1/objects/{bucket.name}/o")
        assert answer.raw.headers.getlist("ais-custom-md") == ["one=1", "two=2"]

    def test_many_set_properties_at_a_time(self, request, bucket):
        put(bucket, "o", b"bytes")
        url = request.getfixturevalue(request.node.callspec.params["ais"]).url

        def add(i: int) -> None:
            # A client each, because a client has one connection.
            other = Client(url).bucket(bucket.name, provider=bucket.provider)
            other.object("o").get_writer().set_custom_props({f"k{i}": str(i)})

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(add, range(8)))
        assert self.custom(bucket, "o") == {f"k{i}": str(i) for i in range(8)}
        assert read(bucket, "o") == b"bytes"

    def test_what_would_not_come_back_is_refused(self, bucket):
        put(bucket, "o", b"1")
        writer = bucket.object("o").get_writer()
        for bad in ({"a": "x,y"}, {"a": "ü"}, {"a b": "x"}, {"a": "x" * 3000}):
            with pytest.raises(AISError) as caught:
                writer.set_custom_props(bad)
            assert caught.value.status_code == 400
        assert self.custom(bucket, "o") == {}
        with pytest.raises(ErrObjNotFound):
            bucket.object("none").get_writer().set_custom_props({"a": "1"})

    def test_they_are_the_origins_metadata(self, node, origin_s3, scratch):
        name = f"{scratch}/object"
        origin_s3.put_object(
            Bucket="scratch",
            Key=name,
            Body=b"bytes",
            ContentType="text/plain",
            Metadata={"there": "1"},
        )
        bucket = Client(node.url).bucket("scratch", provider="s3")
        bucket.object(name).get_writer().set_custom_props({"new": "2"})
        head = origin_s3.head_object(Bucket="scratch", Key=name)
        assert head["Metadata"] == {"there": "1", "new": "2"}
        assert head["ContentType"] == "text/plain"


class TestSeveralMembers:
    @pytest.fixture
    def train(self, node):
        return Client(node.url).bucket("train", provider="s3")

    @pytest.mark.parametrize("shard", sorted(dataset.shards()))
    @pytest.mark.parametrize(
        ("mode", "pattern", "matches"),
        [
            (ArchiveMode.PREFIX, "sample01", lambda n: n.startswith("sample01")),
            (ArchiveMode.SUFFIX, ".cls", lambda n: n.endswith(".cls")),
            (ArchiveMode.SUBSTR, "/sub/", lambda n: "/sub/" in n),
            (ArchiveMode.WDSKEY, "sample007", lambda n: n.rpartition(".")[0] == "sample007"),
            (ArchiveMode.REGEXP, r"[02]\.(jpg|txt)$", re.compile(r"[02]\.(jpg|txt)$").search),
            (ArchiveMode.REGEXP, "^x+.bin$|^ünï", re.compile("^x+.bin$|^ünï").search),
        ],
    )
    def test_members_by_a_pattern(self, train, shard, mode, pattern, matches):
        config = ArchiveConfig(regex=pattern, mode=mode)
        answer = read(train, shard, archive_config=config)
        with tarfile.open(fileobj=io.BytesIO(answer)) as tar:
            found = [(m.name, tar.extractfile(m).read()) for m in tar]
        wanted = [(name, data) for name, data in dataset.MEMBERS.items() if matches(name)]
        assert found == wanted and wanted

    def test_no_match_and_invalid_patterns(self, train):
        def ask(pattern: str, mode: ArchiveMode):
            return read(
                train, "shards/a.tar", archive_config=ArchiveConfig(regex=pattern, mode=mode)
            )

        with pytest.raises(ErrObjNotFound):
            ask("none", ArchiveMode.PREFIX)
        with pytest.raises(AISError) as caught:
            ask("a(b", ArchiveMode.REGEXP)
        assert caught.value.status_code == 400 and "unclosed group" in str(caught.value)


class TestUploadsInParts:
    def test_parts(self, bucket):
        parts = [b"a" * (5 << 20), b"b" * (5 << 20), b"end"]
        upload = bucket.object("whole").multipart_upload().create()
        for number, part in enumerate(parts, 1):
            upload.add_part(number).put_content(part)
        upload.complete()
        assert read(bucket, "whole") == b"".join(parts)

    def test_a_part_as_a_file(self, bucket):
        put(bucket, "filed", b"before")
        upload = bucket.object("filed").multipart_upload().create()
        parts = [b"a" * (5 << 20), b"end"]
        for number, part in enumerate(parts, 1):
            with upload.add_part(number).as_file() as file:
                file.write(part)
            # Readers do not see a part before the upload is completed.
            assert read(bucket, "filed") == b"before"
        upload.complete()
        assert read(bucket, "filed") == b"".join(parts)
        # A file that is opened to be written begins with an empty part, twice.
        upload = bucket.object("filed").multipart_upload().create()
        for number, part in enumerate(parts, 1):
            with upload.add_part(number).as_file("w") as file:
                file.write(b"")
                file.write(part[::-1])
        upload.complete()
        assert read(bucket, "filed") == b"".join(part[::-1] for part in parts)
        # A second write would take the place of the first.
        upload = bucket.object("filed").multipart_upload().create()
        with upload.add_part(1).as_file() as file:
            file.write(b"one")
            with pytest.raises(AISError) as caught:
                file.write(b"two")
        assert caught.value.status_code == 501 and "part 1" in caught.value.message
        upload.abort()

    def test_what_makes_no_sense_is_refused(self, bucket):
        hollow = bucket.object("refused").multipart_upload().create()
        hollow.add_part(1).put_content(b"")
        with pytest.raises(AISError) as caught:
            hollow.complete()
        assert caught.value.status_code == 400 and "part 1" in caught.value.message
        upload = bucket.object("refused").multipart_upload().create()
        upload.add_part(1).put_content(b"part")
        with pytest.raises(AISError) as caught:
            upload.add_part(1).put_content(b"")
        assert caught.value.status_code == 400 and "part 1" in caught.value.message
        # The client has now counted the part twice.
        with pytest.raises(AISError) as caught:
            upload.complete()
        assert caught.value.status_code == 400 and "twice" in caught.value.message
        empty = bucket.object("refused").multipart_upload().create()
        with pytest.raises(AISError):
            empty.complete()
        for left in (hollow, upload, empty):
            left.abort()
        with pytest.raises(ErrObjNotFound):
            read(bucket, "refused")


class TestTheS3Root:
    @pytest.fixture
    def s3(self, wild):
        """boto3 as AIStore's own tests set it up: its endpoint ends in /s3."""
        return boto3.client(
            "s3",
            endpoint_url=f"{wild.url}/s3",
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(s3={"addressing_style": "path"}),
        )

    def test_operations(self, s3):
        name = f"s3-{uuid.uuid4().hex[:10]}"
        s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
        assert name in {b["Name"] for b in s3.list_buckets()["Buckets"]}
        s3.put_object(Bucket=name, Key="a/b c", Body=b"content")
        assert s3.get_object(Bucket=name, Key="a/b c")["Body"].read() == b"content"
        assert s3.head_object(Bucket=name, Key="a/b c")["ContentLength"] == 7
        assert [o["Key"] for o in s3.list_objects_v2(Bucket=name)["Contents"]] == ["a/b c"]
        upload = s3.create_multipart_upload(Bucket=name, Key="parts")
        part = s3.upload_part(
            Bucket=name, Key="parts", PartNumber=1, UploadId=upload["UploadId"], Body=b"p" * 100
        )
        s3.complete_multipart_upload(
            Bucket=name,
            Key="parts",
            UploadId=upload["UploadId"],
            MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]},
        )
        url = s3.generate_presigned_url("get_object", Params={"Bucket": name, "Key": "parts"})
        assert "/s3/" in url and requests.get(url).content == b"p" * 100
        s3.copy_object(Bucket=name, Key="copy", CopySource={"Bucket": name, "Key": "parts"})
        s3.delete_objects(
            Bucket=name, Delete={"Objects": [{"Key": k} for k in ("a/b c", "parts", "copy")]}
        )
        s3.delete_bucket(Bucket=name)

    def test_signatures_are_of_the_path_that_was_signed(self, tmp_path):
        node = locked(
            tmp_path,
            '[[keys]]\naccess_key = "AKIDEXAMPLE"\nsecret_key = "secret-of-this-test-0123"\n',
        )
        (tmp_path / "b" / "data" / "k").write_bytes(b"value")
        try:
            for root in ("", "/s3"):
                for secret, allowed in (("secret-of-this-test-0123", True), ("wrong" * 5, False)):
                    s3 = boto3.client(
                        "s3",
                        endpoint_url=node.url + root,
                        region_name="us-east-1",
                        aws_access_key_id="AKIDEXAMPLE",
                        aws_secret_access_key=secret,
                        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
                    )
                    if allowed:
                        assert s3.get_object(Bucket="data", Key="k")["Body"].read() == b"value"
                        s3.put_object(Bucket="data", Key="w", Body=b"1")
                    else:
                        with pytest.raises(s3.exceptions.ClientError):
                            s3.get_object(Bucket="data", Key="k")
                        with pytest.raises(s3.exceptions.ClientError):
                            s3.put_object(Bucket="data", Key="w", Body=b"2")
        finally:
            node.stop()


class TestTheCluster:
    def test_views(self, ais):
        cluster = ais.cluster()
        assert cluster.is_ready() and cluster.get_info().version == 1
        (performance,) = cluster.get_performance().values()
        assert performance["snode"]["daemon_id"]
        assert cluster.list_jobs_status() == [] and cluster.list_running_jobs() == []


def test_an_append_left_by_its_client_is_given_up_when_the_node_stops(tmp_path):
    (tmp_path / "b" / "data").mkdir(parents=True)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path}/b/*"])
    try:
        writer = Client(node.url).bucket("data").object("o").get_writer()
        handle = writer.append_content(b"x" * (9 << 20))
        assert list((tmp_path / "b" / "data" / ".forebay" / "uploads").iterdir())
        assert handle
    finally:
        assert node.stop(patience=60) == 0
    assert not list((tmp_path / "b" / "data" / ".forebay" / "uploads").iterdir())
    assert "never flushed" in node.log.read_text()


def test_two_who_append_at_once_are_told(local):
    bucket = Client(local.url).bucket(f"b-{uuid.uuid4().hex[:12]}").create()
    writer = bucket.object("o").get_writer()
    handle = writer.append_content(b"")
    begun, go = threading.Event(), threading.Event()

    def slow():
        yield b"a"
        begun.set()
        go.wait(30)
        yield b"b"

    thread = threading.Thread(target=lambda: writer.append_content(slow(), handle=handle))
    thread.start()
    assert begun.wait(30)
    time.sleep(0.5)
    with pytest.raises(AISError) as caught:
        writer.append_content(b"c", handle=handle)
    assert caught.value.status_code == 409
    go.set()
    thread.join()
    bucket.delete()
