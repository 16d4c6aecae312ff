"""Keys with policies: every route, every key, whether the object exists or not, cold or warmed by
somebody else.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import boto3
import dataset
import forebay
import fsspec
import hostile
import pytest
import requests
from botocore.config import Config
from botocore.exceptions import ClientError
from servers import REGION, Node, forebay_program

#: Each key's grants; None: everything.
POLICIES = {
    "root": None,
    "nobody": [],
    "reader": [{"bucket": "train", "prefix": "img/", "actions": ["read"]}],
    "lister": [{"bucket": "train", "prefix": "img/", "actions": ["list"]}],
    "writer": [{"bucket": "scratch", "prefix": "w/", "actions": ["write"]}],
    "copier": [
        {"bucket": "train", "prefix": "img/", "actions": ["read"]},
        {"bucket": "scratch", "prefix": "w/", "actions": ["write"]},
    ],
    "keeper": [{"bucket": "train", "prefix": "img/", "actions": ["admin"]}],
    "operator": [{"bucket": "*", "actions": ["admin"]}],
    "elsewhere": [{"bucket": "other", "actions": ["read", "write", "list", "admin"]}],
}
READERS = {"root", "reader", "copier"}
WRITERS = {"root", "writer", "copier"}
#: Who may know that the bucket `train` exists.
KNOW_TRAIN = {"root", "reader", "lister", "copier", "keeper", "operator"}


def keys_toml(policies=POLICIES) -> str:
    text = []
    for name, allow in policies.items():
        text.append(
            f'[[keys]]\naccess_key = "{name}"\nsecret_key = "secret-of-{name}"\ntoken ='
            f' "token-of-{name}"\n'
        )
        if allow == []:
            text.append("allow = []\n")
        for grant in allow or []:
            text.append(
                f"[[keys.allow]]\nbucket = {json.dumps(grant['bucket'])}\nactions ="
                f" {json.dumps(grant['actions'])}\n"
            )
            if "prefix" in grant:
                text.append(f"prefix = {json.dumps(grant['prefix'])}\n")
    return "".join(text)


def replace(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.rename(path)


def locked_node(origin, directory: Path, text: str = keys_toml()) -> Node:
    directory.mkdir(parents=True, exist_ok=True)
    keys = directory / "keys.toml"
    keys.write_text(text)
    node = Node(
        origin.url,
        ["train", "other", "scratch"],
        directory,
        options=["--set", f"auth.keys_file={keys}", "--set", "auth.unix_trusted=false"],
    )
    node.keys = keys
    return node


@pytest.fixture(scope="module")
def locked(origin, tmp_path_factory):
    node = locked_node(origin, tmp_path_factory.mktemp("locked"))
    # Everything is in the cache already, brought there by another tenant.
    root = s3_of(node, "root")
    for key in ("img/0001.bin", "img/0002.bin", "one", "shards/a.tar"):
        root.get_object(Bucket="train", Key=key)["Body"].read()
    yield node
    node.stop()


def s3_of(node, key: str, secret: str | None = None):
    config = Config(
        s3={"addressing_style": "path"}, retries={"max_attempts": 1}, signature_version="s3v4"
    )
    return boto3.client(
        "s3",
        endpoint_url=node.url,
        aws_access_key_id=key,
        aws_secret_access_key=secret or f"secret-of-{key}",
        region_name=REGION,
        config=config,
    )


def v1(node, key: str, method: str, path: str, **kwargs) -> requests.Response:
    return requests.request(
        method,
        f"{node.url}/v1{path}",
        headers={"Authorization": f"Bearer token-of-{key}"},
        timeout=30,
        **kwargs,
    )


def by_s3(call) -> int:
    """The status of an S3 call; a denial must be S3's own, and say nothing of the cache."""
    try:
        return call()["ResponseMetadata"]["HTTPStatusCode"]
    except ClientError as e:
        status = e.response["ResponseMetadata"]["HTTPStatusCode"]
        assert (status == 403) == (e.response["Error"]["Code"] in ("AccessDenied", "403")), e
        assert "x-cache" not in e.response["ResponseMetadata"]["HTTPHeaders"]
        return status


def by_http(answer: requests.Response) -> int:
    assert answer.ok or "x-cache" not in answer.headers
    return answer.status_code


def presigned(s3, operation: str, method: str, data=None, **params) -> int:
    return by_http(
        requests.request(
            method, s3.generate_presigned_url(operation, Params=params), data=data, timeout=30
        )
    )


IMG = {"Bucket": "train", "Key": "img/0001.bin"}
OUT = {"Bucket": "scratch", "Key": "w/x"}
SOURCE = "train/img/0001.bin"


def parts(s3, complete: bool) -> int:
    """A multipart upload from its begin to its end; the status of the first step that is refused,
    or of the last.
    """
    begun = {}
    status = by_s3(lambda: begun.update(s3.create_multipart_upload(**OUT)) or begun)
    if status != 200:
        # An upload that somebody else began is no easier to access.
        for step in [
            lambda: s3.upload_part(**OUT, UploadId="x", PartNumber=1, Body=b"x"),
            lambda: s3.upload_part_copy(**OUT, UploadId="x", PartNumber=1, CopySource=SOURCE),
            lambda: s3.list_parts(**OUT, UploadId="x"),
            lambda: s3.complete_multipart_upload(
                **OUT, UploadId="x", MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": "x"}]}
            ),
            lambda: s3.abort_multipart_upload(**OUT, UploadId="x"),
        ]:
            assert by_s3(step) == status
        return status
    upload = {**OUT, "UploadId": begun["UploadId"]}
    etag = s3.upload_part(**upload, PartNumber=1, Body=b"part")["ETag"]
    assert len(s3.list_parts(**upload)["Parts"]) == 1
    if complete:
        return by_s3(
            lambda: s3.complete_multipart_upload(
                **upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]}
            )
        )
    return by_s3(lambda: s3.abort_multipart_upload(**upload))


def part_copy(s3, root) -> int:
    upload = {**OUT, "UploadId": root.create_multipart_upload(**OUT)["UploadId"]}
    try:
        return by_s3(lambda: s3.upload_part_copy(**upload, PartNumber=1, CopySource=SOURCE))
    finally:
        root.abort_multipart_upload(**upload)


#: What is done; who may do it; what they get. Everybody else gets 403.
S3 = [
    ("get", lambda s, _: by_s3(lambda: s.get_object(**IMG)), READERS, 200),
    ("get range", lambda s, _: by_s3(lambda: s.get_object(**IMG, Range="bytes=1-2")), READERS, 206),
    (
        "get what is not satisfiable",
        lambda s, _: by_s3(lambda: s.get_object(**IMG, Range="bytes=99999999-")),
        READERS,
        416,
    ),
    ("get past the cache", lambda s, _: presigned(s, "get_object", "GET", **IMG), READERS, 200),
    ("head", lambda s, _: by_s3(lambda: s.head_object(**IMG)), READERS, 200),
    ("head presigned", lambda s, _: presigned(s, "head_object", "HEAD", **IMG), READERS, 200),
    (
        "attributes",
        lambda s, _: by_s3(lambda: s.get_object_attributes(**IMG, ObjectAttributes=["ObjectSize"])),
        READERS,
        200,
    ),
    (
        "get what is missing",
        lambda s, _: by_s3(lambda: s.get_object(Bucket="train", Key="img/none")),
        READERS,
        404,
    ),
    (
        "head what is missing",
        lambda s, _: by_s3(lambda: s.head_object(Bucket="train", Key="img/none")),
        READERS,
        404,
    ),
    (
        "get outside",
        lambda s, _: by_s3(lambda: s.get_object(Bucket="train", Key="one")),
        {"root"},
        200,
    ),
    (
        "get what is missing outside",
        lambda s, _: by_s3(lambda: s.get_object(Bucket="train", Key="none")),
        {"root"},
        404,
    ),
    (
        "get from no bucket",
        lambda s, _: by_s3(lambda: s.get_object(Bucket="no-such-bucket", Key="k")),
        {"root"},
        404,
    ),
    (
        "list",
        lambda s, _: by_s3(lambda: s.list_objects_v2(Bucket="train", Prefix="img/")),
        {"root", "lister"},
        200,
    ),
    (
        "list deeper",
        lambda s, _: by_s3(
            lambda: s.list_objects_v2(Bucket="train", Prefix="img/00", Delimiter="/")
        ),
        {"root", "lister"},
        200,
    ),
    (
        "list, first version",
        lambda s, _: by_s3(lambda: s.list_objects(Bucket="train", Prefix="img/")),
        {"root", "lister"},
        200,
    ),
    (
        "list nothing",
        lambda s, _: by_s3(lambda: s.list_objects_v2(Bucket="train", Prefix="img/", MaxKeys=0)),
        {"root", "lister"},
        200,
    ),
    (
        "list the bucket",
        lambda s, _: by_s3(lambda: s.list_objects_v2(Bucket="train")),
        {"root"},
        200,
    ),
    (
        "list a shorter prefix",
        lambda s, _: by_s3(lambda: s.list_objects_v2(Bucket="train", Prefix="img", Delimiter="/")),
        {"root"},
        200,
    ),
    (
        "list after a name",
        lambda s, _: by_s3(lambda: s.list_objects_v2(Bucket="train", StartAfter="img/")),
        {"root"},
        200,
    ),
    ("put", lambda s, _: by_s3(lambda: s.put_object(**OUT, Body=b"data")), WRITERS, 200),
    (
        "put checked",
        lambda s, _: by_s3(lambda: s.put_object(**OUT, Body=b"data", ChecksumAlgorithm="SHA256")),
        WRITERS,
        200,
    ),
    ("put presigned", lambda s, _: presigned(s, "put_object", "PUT", b"data", **OUT), WRITERS, 200),
    (
        "put outside",
        lambda s, _: by_s3(lambda: s.put_object(Bucket="scratch", Key="outside", Body=b"")),
        {"root"},
        200,
    ),
    (
        "put onto what may be read",
        lambda s, _: by_s3(lambda: s.put_object(Bucket="train", Key="img/new", Body=b"")),
        {"root"},
        200,
    ),
    (
        "delete what may be read",
        lambda s, _: by_s3(lambda: s.delete_object(Bucket="train", Key="img/new")),
        {"root"},
        204,
    ),
    ("delete", lambda s, _: by_s3(lambda: s.delete_object(**OUT)), WRITERS, 204),
    (
        "copy",
        lambda s, _: by_s3(lambda: s.copy_object(**OUT, CopySource=SOURCE)),
        {"root", "copier"},
        200,
    ),
    (
        "copy from outside",
        lambda s, _: by_s3(lambda: s.copy_object(**OUT, CopySource="train/one")),
        {"root"},
        200,
    ),
    (
        "copy to outside",
        lambda s, _: by_s3(lambda: s.copy_object(Bucket="scratch", Key="y", CopySource=SOURCE)),
        {"root"},
        200,
    ),
    ("copy a part", part_copy, {"root", "copier"}, 200),
    ("upload by parts", lambda s, _: parts(s, True), WRITERS, 200),
    ("give an upload up", lambda s, _: parts(s, False), WRITERS, 204),
    (
        "uploads",
        lambda s, _: by_s3(lambda: s.list_multipart_uploads(Bucket="train", Prefix="img/")),
        {"root", "lister"},
        200,
    ),
    (
        "uploads of the bucket",
        lambda s, _: by_s3(lambda: s.list_multipart_uploads(Bucket="train")),
        {"root"},
        200,
    ),
    ("head bucket", lambda s, _: by_s3(lambda: s.head_bucket(Bucket="train")), KNOW_TRAIN, 200),
    (
        "location",
        lambda s, _: by_s3(lambda: s.get_bucket_location(Bucket="train")),
        KNOW_TRAIN,
        200,
    ),
    (
        "head no bucket",
        lambda s, _: by_s3(lambda: s.head_bucket(Bucket="no-such-bucket")),
        {"root", "operator"},
        404,
    ),
    (
        "remove a bucket",
        lambda s, _: by_s3(lambda: s.delete_bucket(Bucket="no-such-bucket")),
        {"root", "operator"},
        404,
    ),
]


@pytest.mark.parametrize("key", POLICIES)
@pytest.mark.parametrize(
    ("call", "allowed", "status"), [row[1:] for row in S3], ids=[row[0] for row in S3]
)
def test_s3(locked, key, call, allowed, status):
    assert call(s3_of(locked, key), s3_of(locked, "root")) == (status if key in allowed else 403)


def batch(node, key, names, **options) -> requests.Response:
    body = {
        "mime": ".tar",
        "in": [{"objname": n} if isinstance(n, str) else n for n in names],
        "strm": True,
        **options,
    }
    return v1(node, key, "POST", "/ml/moss/train", json=body)


def listing(node, key, prefix, bucket="train", **value) -> requests.Response:
    return v1(
        node,
        key,
        "GET",
        f"/buckets/{bucket}",
        json={"action": "list", "value": {"prefix": prefix, **value}},
    )


def act(node, key, action, **body) -> int:
    return v1(node, key, "POST", f"/forebay/{action}", json={"bucket": "train", **body}).status_code


V1 = [
    ("get", lambda n, k: by_http(v1(n, k, "GET", "/objects/train/img/0001.bin")), READERS, 200),
    (
        "head",
        lambda n, k: by_http(v1(n, k, "HEAD", "/objects/train/img/0001.bin?props=version")),
        READERS,
        200,
    ),
    (
        "get what is missing",
        lambda n, k: by_http(v1(n, k, "GET", "/objects/train/img/none")),
        READERS,
        404,
    ),
    ("get outside", lambda n, k: by_http(v1(n, k, "GET", "/objects/train/one")), {"root"}, 200),
    (
        "get what is missing outside",
        lambda n, k: by_http(v1(n, k, "GET", "/objects/train/none")),
        {"root"},
        404,
    ),
    (
        "get encoded",
        lambda n, k: by_http(v1(n, k, "GET", "/objects/train/img%2F0001.bin")),
        READERS,
        200,
    ),
    (
        "member",
        lambda n, k: by_http(v1(n, k, "GET", "/objects/train/shards/a.tar?archpath=sample000.jpg")),
        {"root"},
        200,
    ),
    (
        "member that is missing",
        lambda n, k: by_http(v1(n, k, "GET", "/objects/train/shards/a.tar?archpath=no")),
        {"root"},
        404,
    ),
    ("put", lambda n, k: by_http(v1(n, k, "PUT", "/objects/scratch/w/v", data=b"v")), WRITERS, 200),
    (
        "put outside",
        lambda n, k: by_http(v1(n, k, "PUT", "/objects/scratch/v", data=b"v")),
        {"root"},
        200,
    ),
    (
        "begin an upload",
        lambda n, k: by_http(
            v1(n, k, "POST", "/objects/scratch/w/v", json={"action": "mpt-upload"})
        ),
        WRITERS,
        200,
    ),
    (
        "put a part",
        lambda n, k: by_http(
            v1(n, k, "PUT", "/objects/scratch/w/v?uploadId=x&partNumber=0", data=b"v")
        ),
        WRITERS,
        400,
    ),
    (
        "copy",
        lambda n, k: by_http(
            v1(n, k, "PUT", "/objects/train/img/0001.bin?object_to=s3/@%23/scratch/w/c")
        ),
        {"root", "copier"},
        200,
    ),
    (
        "copy to outside",
        lambda n, k: by_http(
            v1(n, k, "PUT", "/objects/train/img/0001.bin?object_to=s3/@%23/scratch/c")
        ),
        {"root"},
        200,
    ),
    ("list", lambda n, k: by_http(listing(n, k, "img/")), {"root", "lister"}, 200),
    ("list a shorter prefix", lambda n, k: by_http(listing(n, k, "im")), {"root"}, 200),
    ("list no bucket", lambda n, k: by_http(listing(n, k, "", "no-such-bucket")), {"root"}, 404),
    ("head bucket", lambda n, k: by_http(v1(n, k, "HEAD", "/buckets/train")), KNOW_TRAIN, 200),
    ("batch", lambda n, k: by_http(batch(n, k, ["img/0001.bin", "img/0002.bin"])), READERS, 200),
    (
        "batch, buffered",
        lambda n, k: by_http(batch(n, k, ["img/0001.bin"], strm=False)),
        READERS,
        200,
    ),
    (
        "batch with one from outside",
        lambda n, k: by_http(batch(n, k, ["img/0001.bin", "one"])),
        {"root"},
        200,
    ),
    (
        "batch by unique name",
        lambda n, k: by_http(batch(n, k, [{"objname": "a", "uname": "s3/@#/other/a"}])),
        {"root", "elsewhere"},
        404,
    ),
    (
        "batch from no bucket",
        lambda n, k: by_http(batch(n, k, [{"objname": "a", "bucket": "no-such-bucket"}])),
        {"root"},
        404,
    ),
    (
        "stat",
        lambda n, k: by_http(v1(n, k, "GET", "/forebay/stat/train/img/0001.bin")),
        READERS,
        200,
    ),
    (
        "pin",
        lambda n, k: act(n, k, "pin", keys=["img/0001.bin"]),
        {"root", "keeper", "operator"},
        200,
    ),
    (
        "pin outside",
        lambda n, k: act(n, k, "pin", keys=["img/0001.bin", "one"]),
        {"root", "operator"},
        200,
    ),
    (
        "unpin",
        lambda n, k: act(n, k, "unpin", manifest="img/0001.bin\n"),
        {"root", "keeper", "operator"},
        200,
    ),
    ("unpin all", lambda n, k: act(n, k, "unpin", prefix=""), {"root", "operator"}, 200),
    (
        "warm",
        lambda n, k: act(n, k, "warm", prefix="img/000", dry_run=True),
        {"root", "keeper", "operator"},
        200,
    ),
    (
        "warm all",
        lambda n, k: act(n, k, "warm", prefix="", dry_run=True),
        {"root", "operator"},
        200,
    ),
    (
        "evict",
        lambda n, k: act(n, k, "evict", prefix="img/", dry_run=True),
        {"root", "keeper", "operator"},
        200,
    ),
    (
        "pins",
        lambda n, k: by_http(v1(n, k, "GET", "/forebay/pinned")),
        {"root", "keeper", "operator", "elsewhere"},
        200,
    ),
    ("status", lambda n, k: by_http(v1(n, k, "GET", "/forebay/status")), {"root", "operator"}, 200),
    ("info", lambda n, k: by_http(v1(n, k, "GET", "/forebay/info")), set(POLICIES), 200),
    ("map", lambda n, k: by_http(v1(n, k, "GET", "/daemon?what=smap")), set(POLICIES), 200),
    (
        "make a bucket",
        lambda n, k: by_http(v1(n, k, "POST", "/buckets/train", json={"action": "create-bck"})),
        {"root", "operator"},
        None,
    ),
]


@pytest.mark.parametrize("key", POLICIES)
@pytest.mark.parametrize(
    ("call", "allowed", "status"), [row[1:] for row in V1], ids=[row[0] for row in V1]
)
def test_v1(locked, key, call, allowed, status):
    got = call(locked, key)
    if key not in allowed:
        assert got == 403
    elif status is not None:
        assert got == status
    else:
        assert got != 403


def test_a_denial_is_the_same_for_what_is_warm_cold_and_missing(locked):
    def answers(key):
        s3, found = s3_of(locked, key), []
        for name in ("one", "big/chunk", "no/such/name"):
            with pytest.raises(ClientError) as caught:
                s3.get_object(Bucket="train", Key=name)
            error = caught.value.response
            headers = {
                h: v
                for h, v in error["ResponseMetadata"]["HTTPHeaders"].items()
                if h not in ("x-amz-request-id", "x-request-id", "date")
            }
            headers.pop("content-length", None)
            found.append((error["Error"]["Message"].replace(name, "NAME"), headers))
            answer = v1(locked, key, "GET", f"/objects/train/{name}")
            found[-1] += (answer.status_code, answer.json()["message"].replace(name, "NAME"))
        return found

    for key in ("nobody", "reader", "lister", "elsewhere"):
        warm, cold, missing = answers(key)
        assert warm == cold == missing
    fetched = 'forebay_answers_total{x_cache="MISS"}'
    before = locked.metrics()[fetched]
    answers("nobody")
    assert locked.metrics()[fetched] == before, "nothing is fetched for what is denied"


def test_a_batch_puts_placeholders_for_what_is_denied(locked, objects):
    import io
    import tarfile

    names = [
        "img/0001.bin",
        "one",
        "no/such/name",
        {"objname": "x", "bucket": "no-such-bucket"},
        "img/none",
        "img/0002.bin",
    ]
    for streaming in (True, False):
        answer = batch(locked, "reader", names, coer=True, strm=streaming)
        assert answer.status_code == 200
        content = answer.content if streaming else answer.content.split(b"\r\n\r\n", 2)[2]
        members = tarfile.open(fileobj=io.BytesIO(content)).getmembers()
        expected = [
            "train/img/0001.bin",
            "__404__/train/one",
            "__404__/train/no/such/name",
            "__404__/no-such-bucket/x",
        ]
        assert [m.name for m in members] == [
            *expected,
            "__404__/train/img/none",
            "train/img/0002.bin",
        ]
        assert [m.size for m in members] == [
            len(objects["img/0001.bin"]),
            0,
            0,
            0,
            0,
            len(objects["img/0002.bin"]),
        ]
        if not streaming:
            told = json.loads(answer.content.split(b"\r\n\r\n", 2)[1].split(b"\r\n")[0])["out"]
            assert "not allowed" in told[1]["err_msg"] and "not allowed" in told[3]["err_msg"]
            assert told[1]["err_msg"].replace("one", "N") == told[2]["err_msg"].replace(
                "no/such/name", "N"
            )


def test_delete_objects_is_decided_key_by_key(locked):
    root, writer = s3_of(locked, "root"), s3_of(locked, "writer")
    for key in ("w/1", "w/2", "kept"):
        root.put_object(Bucket="scratch", Key=key, Body=b"x")
    keys = [{"Key": k} for k in ("w/1", "kept", "w/2", "absent")]
    answer = writer.delete_objects(Bucket="scratch", Delete={"Objects": keys})
    assert [d["Key"] for d in answer["Deleted"]] == ["w/1", "w/2"]
    assert [(e["Key"], e["Code"]) for e in answer["Errors"]] == [
        ("kept", "AccessDenied"),
        ("absent", "AccessDenied"),
    ]
    assert root.head_object(Bucket="scratch", Key="kept")
    with pytest.raises(ClientError, match="AccessDenied"):
        s3_of(locked, "elsewhere").delete_objects(Bucket="scratch", Delete={"Objects": keys})


def test_only_what_is_allowed_is_listed(locked):
    known = {
        "root": {"train", "other", "scratch"},
        "operator": {"train", "other", "scratch"},
        "nobody": set(),
        "reader": {"train"},
        "writer": {"scratch"},
        "elsewhere": {"other"},
    }
    for key, buckets in known.items():
        assert {b["Name"] for b in s3_of(locked, key).list_buckets()["Buckets"]} == buckets, key
        assert {
            b["name"] for b in v1(locked, key, "GET", "/buckets", json={"action": "list"}).json()
        } == buckets, key
    seen = [
        o["Key"]
        for o in s3_of(locked, "lister").list_objects_v2(Bucket="train", Prefix="img/")["Contents"]
    ]
    assert seen and all(name.startswith("img/") for name in seen)
    # Only those who may read an object learn whether it is in the cache.
    cached = 1 << 6
    flags = {
        k: {e["name"]: e["flags"] for e in listing(locked, k, "img/").json()["entries"]}
        for k in ("root", "lister")
    }
    assert flags["root"]["img/0001.bin"] & cached and not any(
        f & cached for f in flags["lister"].values()
    )


def test_members_are_listed_to_those_who_may_read_the_archive(locked, origin, tmp_path):
    lists = [{"bucket": "train", "prefix": "shards/", "actions": ["list"]}]
    reads = [*lists, {"bucket": "train", "prefix": "shards/", "actions": ["read"]}]
    node = locked_node(origin, tmp_path, keys_toml({"lists": lists, "reads": reads}))
    try:
        archives = 1 << 3
        names = {
            k: [e["name"] for e in listing(node, k, "shards/a", flags=archives).json()["entries"]]
            for k in ("lists", "reads")
        }
        assert "shards/a.tar/sample000.jpg" in names["reads"] and set(names["lists"]) < set(
            dataset.objects()
        )
        # A token that names another archive does not open it.
        import base64

        token = base64.urlsafe_b64encode(b'{"k":"shards/a.tar","m":0}').rstrip(b"=").decode()
        entries = listing(
            node, "lists", "shards/", flags=archives, continuation_token=token
        ).json()["entries"]
        assert not any("a.tar/" in e["name"] for e in entries)
        assert (
            listing(node, "reads", "shards/z", flags=archives, continuation_token=token).status_code
            == 400
        )
    finally:
        node.stop()


def test_labels_are_for_those_who_may_read_the_object_that_lists_them(
    origin, origin_s3, scratch, tmp_path
):
    for name in ("1", "2"):
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/img/{name}.bin", Body=b"x")
    labels = f"{scratch}/private/labels.csv"
    listed = b"file,label\n1.bin,benign\n2.bin,malignant\n"
    origin_s3.put_object(Bucket="scratch", Key=labels, Body=listed)
    images = {"bucket": "scratch", "prefix": f"{scratch}/img/", "actions": ["read", "list"]}
    policies = {
        "root": None,
        "images": [images],
        "both": [images, {"bucket": "scratch", "prefix": labels, "actions": ["read"]}],
    }
    node = locked_node(origin, tmp_path, keys_toml(policies))
    source = {"source": f"scratch/{scratch}/img/", "format": "objects"}
    labelled = source | {"labels": {"from": "file", "name": f"s3://scratch/{labels}"}}

    benign = {"op": "compare", "column": "label", "how": "==", "value": {"string": "benign"}}
    left = ""

    def ask(key: str, method: str, path: str, **kwargs) -> requests.Response:
        return v1(node, key, method, f"/datasets{path}", **kwargs)

    def uses(key: str, dataset: str) -> dict[str, int]:
        """The status of everything that can be asked of a dataset by its id."""
        plan = {"sources": [{"dataset": dataset}], "seed": 1, "shuffle": {"kind": "none"}}
        streamed = {"plan": plan, "partition": {"batch": {"rows": 2}}, "until_epoch": 1}
        to = {"to": f"scratch/{scratch}/img/m"}
        return {
            "describe": ask(key, "GET", f"/{dataset}").status_code,
            "shape": ask(key, "GET", f"/{dataset}/shape").status_code,
            "manifest": ask(key, "GET", f"/{dataset}/manifest").status_code,
            "write": ask(key, "POST", f"/{dataset}/manifest", params=to).status_code,
            "rows": ask(key, "POST", f"/{dataset}/rows", data=bytes(16)).status_code,
            "filter": ask(key, "POST", f"/{dataset}/filters", json=benign).status_code,
            "filtered": ask(key, "GET", f"/{dataset}/filters/{left}").status_code,
            "index": ask(key, "POST", f"/{dataset}/keys?column=key").status_code,
            "keys": ask(key, "POST", f"/{dataset}/keys?column=key", json=["a"]).status_code,
            "by_key": ask(key, "POST", f"/{dataset}/rows?key=key", json=[]).status_code,
            "stream": ask(key, "POST", "/streams", json=streamed).status_code,
        }

    try:
        opened = ask("root", "POST", "", json=labelled)
        assert opened.status_code == 200, opened.text
        dataset = opened.json()["id"]
        rows = ask("root", "POST", f"/{dataset}/rows", data=bytes(16))
        assert rows.status_code == 200 and b"benign" in rows.content
        found = ask("root", "POST", f"/{dataset}/filters", json=benign).json()
        assert found["rows"] == 1
        left = found["filter"]
        assert set(uses("root", dataset).values()) == {200}
        # By their id as by their description; and again, because answers are remembered.
        for _ in range(2):
            assert ask("images", "POST", "", json=labelled).status_code == 403
            assert set(uses("images", dataset).values()) == {403}
            assert ask("both", "POST", "", json=labelled).status_code == 200
            writes = {"write": 403}
            assert uses("both", dataset) == dict.fromkeys(uses("root", dataset), 200) | writes
        known = {k: {d["id"] for d in ask(k, "GET", "").json()["datasets"]} for k in policies}
        assert dataset in known["root"] & known["both"] and dataset not in known["images"]
        # The same files without those labels are for whoever may read the files, and labels that
        # are in their names too.
        for more in ({}, {"labels": {"from": "path"}}):
            plain = ask("images", "POST", "", json=source | more)
            assert plain.status_code == 200, plain.text
            assert uses("images", plain.json()["id"])["rows"] == 200
        # A node that was started again reads what the dataset was from its disk.
        node.stop()
        node = locked_node(origin, tmp_path, keys_toml(policies))
        assert uses("images", dataset)["rows"] == 403
        assert uses("both", dataset)["rows"] == 200
    finally:
        node.stop()


def test_wrong_keys_do_not_come_in(locked):
    for key, secret, code in [
        ("root", "wrong", "SignatureDoesNotMatch"),
        ("who", "x", "InvalidAccessKeyId"),
    ]:
        with pytest.raises(ClientError, match=code):
            s3_of(locked, key, secret).get_object(**IMG)
    url = s3_of(locked, "reader").generate_presigned_url("get_object", Params=IMG)
    assert requests.get(url, timeout=30).status_code == 200
    # The signature does not carry over to another object, nor to another key's name.
    assert requests.get(url.replace("0001", "0002"), timeout=30).status_code == 403
    assert requests.get(url.replace("reader", "root"), timeout=30).status_code == 403
    assert requests.get(f"{locked.url}/train/img/0001.bin", timeout=30).status_code == 403
    for headers in (
        {},
        {"Authorization": "Bearer token-of-who"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic cm9vdA=="},
    ):
        assert (
            requests.get(
                f"{locked.url}/v1/objects/train/img/0001.bin", headers=headers, timeout=30
            ).status_code
            == 401
        )


def test_who_waits_to_be_asked_for_a_body_and_is_refused_begins_a_new_connection(locked):
    """botocore takes the refusal for the end of its request: on the same connection, the first
    bytes of its next request would be read as the body that it never sent.
    """

    def put(key: str) -> socket.socket:
        url = s3_of(locked, key).generate_presigned_url("put_object", Params=OUT)
        head = (
            f"PUT {url.removeprefix(locked.url)} HTTP/1.1\r\nHost: 127.0.0.1:{locked.port}\r\n"
            "Expect: 100-continue\r\nContent-Length: 1\r\n\r\n"
        )
        connection = hostile.connect(locked.port)
        connection.sendall(head.encode())
        return connection

    with put("reader") as connection:
        exchange = hostile.receive(connection)
    (answer,) = exchange.answers
    assert (answer.status, answer.headers["connection"]) == (403, "close")
    assert b"100 Continue" not in exchange.received and exchange.closed
    with put("writer") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(b"xGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        exchange = hostile.receive(connection, want=2)
    assert exchange.answers[0].status == 200 and "connection" not in exchange.answers[0].headers


def test_the_unmodified_aistore_client_sends_its_token(locked, objects, monkeypatch):
    from aistore.sdk import Client
    from aistore.sdk.errors import AISError

    monkeypatch.setenv("AIS_AUTHN_TOKEN", "token-of-reader")
    bucket = Client(locked.url).bucket("train", provider="s3")
    assert bucket.object("img/0001.bin").get_reader().read_all() == objects["img/0001.bin"]
    with pytest.raises(AISError) as caught:
        bucket.object("one").get_reader().read_all()
    assert "403" in str(caught.value) or "not allowed" in str(caught.value)


def test_the_python_client_sends_its_token(locked, objects):
    client = forebay.Client(locked.url, token="token-of-reader")
    assert bytes(client.get("train/img/0001.bin")) == objects["img/0001.bin"]
    batch = client.batch(
        ["train/img/0001.bin", "train/one", "train/img/0002.bin"], continue_on_error=True
    )
    got = [(item.error is None, bytes(item.data) if item.error is None else None) for item in batch]
    assert got == [(True, objects["img/0001.bin"]), (False, None), (True, objects["img/0002.bin"])]
    for refused in (
        lambda: client.get("train/one"),
        lambda: list(client.batch(["train/one"])),
        lambda: list(client.list("train")),
    ):
        with pytest.raises(forebay.PermissionDenied):
            refused()
    with pytest.raises(forebay.Unauthenticated):
        forebay.Client(locked.url).get("train/img/0001.bin")


def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_a_key_for_a_prefix_sees_it_as_a_directory(origin, tmp_path):
    """The name of the directory, without the slash, is not the key's to read or to list."""
    images = {"bucket": "train", "prefix": "img/", "actions": ["read", "list"]}
    writes = {"bucket": "scratch", "prefix": "w/", "actions": ["write"]}
    policies = {"both": [images, writes], "blind": [{**images, "actions": ["read"]}]}
    node = locked_node(origin, tmp_path, keys_toml(policies))
    try:
        of = {
            name: fsspec.filesystem("forebay", url=node.url, token=f"token-of-{name}")
            for name in policies
        }
        fs = of["both"]
        files = fs.find("train/img")
        assert files and files == fs.glob("train/img/*")
        assert fs.info("train/img")["type"] == "directory"
        assert fs.isdir("train/img") and fs.isfile(files[0]) and not fs.isfile("train/img/none")
        assert fs.du("train/img") == sum(fs.size(file) for file in files)
        fs.get("train/img", str(tmp_path / "copy"), recursive=True)
        assert len(list((tmp_path / "copy").iterdir())) == len(files)
        fs.put(str(tmp_path / "copy" / files[0].rpartition("/")[2]), "scratch/w/x")
        for kind, path in (("both", "train/one"), ("both", "train"), ("blind", "train/img")):
            with pytest.raises(forebay.PermissionDenied):
                of[kind].info(path)
    finally:
        node.stop()


def test_policies_change_while_the_node_runs(origin, tmp_path):
    node = locked_node(origin, tmp_path)
    try:
        may = lambda key, name: v1(node, key, "GET", f"/objects/train/{name}").status_code  # noqa: E731
        assert (may("reader", "img/0001.bin"), may("reader", "one")) == (200, 403)

        replace(
            node.keys,
            keys_toml(
                {**POLICIES, "reader": [{"bucket": "train", "prefix": "one", "actions": ["read"]}]}
            ),
        )
        until(lambda: may("reader", "one") == 200)
        assert may("reader", "img/0001.bin") == 403, "a table is taken over as a whole"
        assert by_s3(lambda: s3_of(node, "reader").get_object(**IMG)) == 403

        replace(node.keys, "[[keys]]\naccess_key = \n")
        until(lambda: node.metrics()['forebay_reload_stale{what="keys"}'] == 1)
        assert (may("reader", "one"), may("root", "one")) == (200, 200), (
            "a broken file changes nothing"
        )
        assert node.metrics()['forebay_reloads_failed_total{what="keys"}'] == 1
        assert "cannot be used" in node.log.read_text() and "secret-of" not in node.log.read_text()

        replace(node.keys, keys_toml({"root": None}))
        until(lambda: may("reader", "one") == 401)
        assert node.metrics()['forebay_reload_stale{what="keys"}'] == 0
        with pytest.raises(ClientError, match="InvalidAccessKeyId"):
            s3_of(node, "reader").get_object(**IMG)

        done = node.metrics()['forebay_reloads_total{what="keys"}']
        node.process.send_signal(signal.SIGHUP)
        until(lambda: node.metrics()['forebay_reloads_total{what="keys"}'] > done)
        assert may("root", "one") == 200
    finally:
        assert node.stop(patience=60) == 0


def test_a_keys_file_can_be_tried_before_it_is_in_force(tmp_path):
    keys = tmp_path / "keys.toml"
    command = [
        forebay_program(),
        "config",
        "check",
        "--origin",
        str(tmp_path),
        "--set",
        f"auth.keys_file={keys}",
    ]
    for text, wrong in [
        (keys_toml(), None),
        ('[[keys]]\naccess_key = "a"\n', "secret"),
        ('[[keys]]\ntoken = "very-secret"\nallow = [{ bucket = "b" }]\n', "actions"),
        ('[[keys]]\ntoken = "very-secret"\nalow = []\n', '"allow"'),
    ]:
        keys.write_text(text)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode == 0) == (wrong is None), done.stdout + done.stderr
        assert (wrong or "ok") in done.stdout and "very-secret" not in done.stdout + done.stderr


def test_keys_change_under_load_without_a_wrong_answer(origin, tmp_path, objects):
    """While policies change back and forth, every answer is that of one of them, complete."""
    import threading

    narrow = keys_toml(
        {**POLICIES, "reader": [{"bucket": "train", "prefix": "img/0002", "actions": ["read"]}]}
    )
    node = locked_node(origin, tmp_path)
    stop, wrong, seen = threading.Event(), [], set()

    def read():
        session = requests.Session()
        session.headers["Authorization"] = "Bearer token-of-reader"
        while not stop.is_set():
            for name, allowed in (
                ("img/0001.bin", {200, 403}),
                ("img/0002.bin", {200}),
                ("one", {403}),
            ):
                answer = session.get(f"{node.url}/v1/objects/train/{name}", timeout=30)
                seen.add((name, answer.status_code))
                if answer.status_code not in allowed or (
                    answer.ok and answer.content != objects[name]
                ):
                    wrong.append((name, answer.status_code))

    threads = [threading.Thread(target=read) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        both = {("img/0001.bin", 200), ("img/0001.bin", 403)}
        for i in range(200):
            replace(node.keys, narrow if i % 2 == 0 else keys_toml())
            node.process.send_signal(signal.SIGHUP)
            time.sleep(0.15)
            if i >= 9 and both <= seen:
                break
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        node.stop()
    assert not wrong and both <= seen
