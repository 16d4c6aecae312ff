"""What is not cached is the origin's: boto3 gets the same answers through a node as from versitygw
itself, and a recording stand-in shows what reaches an origin for what versitygw lacks.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import os
import threading
import time
import urllib.error
import urllib.request
import zlib

import pytest
from botocore.exceptions import ClientError
from conftest import s3_client
from servers import ACCESS_KEY, REGION, SECRET_KEY, Node, Versitygw

MIB = 1 << 20


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """versitygw with versions."""
    directory = tmp_path_factory.mktemp("versioned")
    (directory / "versions").mkdir()
    server = Versitygw(directory, options=["--versioning-dir", str(directory / "versions")])
    yield server
    server.stop()


@pytest.fixture(scope="module")
def before(service, tmp_path_factory):
    """A node in front of all of its buckets."""
    options = ["--origin", f"s3://?endpoint={service.url}&region={REGION}"]
    node = Node(service.url, [], tmp_path_factory.mktemp("before"), options=options)
    yield node
    node.stop()


@pytest.fixture(scope="module")
def direct(service):
    return s3_client(service.url)


@pytest.fixture(scope="module")
def through(before):
    return s3_client(before.url)


@pytest.fixture
def buckets(direct, request):
    """Two alike: one for calls that go straight to the service, one for those through the node."""
    name = hashlib.md5(request.node.name.encode()).hexdigest()[:12]
    pair = f"{name}-direct", f"{name}-node"
    for bucket in pair:
        direct.create_bucket(
            Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION}
        )
    return pair


# What differs between two buckets, or two moments.
OWN = {
    "ResponseMetadata",
    "UploadId",
    "VersionId",
    "CopySourceVersionId",
    "LastModified",
    "NextVersionIdMarker",
    "Location",
}


def plain(answer, bucket):
    if isinstance(answer, dict):
        own = {k: plain(v, bucket) for k, v in answer.items() if k not in OWN}
        if "TagSet" in own:  # A set: versitygw returns it in a different order each time.
            own["TagSet"].sort(key=lambda tag: tag["Key"])
        return own
    if isinstance(answer, list):
        return [plain(v, bucket) for v in answer]
    return answer.replace(bucket, "BUCKET") if isinstance(answer, str) else answer


def outcome(call, bucket):
    """The result of a call: its status, and its answer or its error."""
    try:
        answer = call()
    except ClientError as e:
        error = e.response["Error"]
        status = e.response["ResponseMetadata"]["HTTPStatusCode"]
        return status, error["Code"], error["Message"].replace(bucket, "BUCKET")
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    body = answer.pop("Body").read() if "Body" in answer else None
    return status, plain(answer, bucket), body


@pytest.fixture
def same(direct, through, buckets):
    """Makes a call both ways and returns both answers, which must be alike."""

    def both(name, **arguments):
        got = []
        for client, bucket in zip((direct, through), buckets, strict=True):
            filled = {
                k: v(bucket) if callable(v) else v
                for k, v in ({"Bucket": bucket} | arguments).items()
            }
            got.append(outcome(lambda: getattr(client, name)(**filled), bucket))
        assert got[0] == got[1], name
        return got[1]

    return both


def test_settings_of_buckets(same):
    tags = {"TagSet": [{"Key": "team", "Value": "a b&c"}]}
    for name, arguments in [
        ("get_bucket_versioning", {}),
        ("get_bucket_acl", {}),
        ("get_bucket_policy", {}),
        ("get_bucket_tagging", {}),
        ("put_bucket_tagging", {"Tagging": tags}),
        ("get_bucket_tagging", {}),
        ("delete_bucket_tagging", {}),
        ("get_bucket_tagging", {}),
        ("get_bucket_ownership_controls", {}),
        ("get_object_lock_configuration", {}),
        ("get_bucket_cors", {}),
        ("get_bucket_lifecycle_configuration", {}),
        ("get_bucket_encryption", {}),
        ("get_bucket_replication", {}),
        ("get_bucket_website", {}),
        ("put_bucket_policy", {"Policy": "{}"}),
        (
            "put_bucket_policy",
            {
                "Policy": lambda bucket: (
                    '{"Statement": [{"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject",'
                    f' "Resource": "arn:aws:s3:::{bucket}/*"}}]}}'
                )
            },
        ),
        ("get_bucket_policy", {}),
        ("delete_bucket_policy", {}),
    ]:
        same(name, **arguments)
    assert same("get_bucket_versioning")[0] == 200


def test_tags_attributes_and_checksums_of_objects(same, through, buckets):
    body = b"content" * 1000
    sha256 = base64.b64encode(hashlib.sha256(body).digest()).decode()
    same("put_object", Key="ü k", Body=body, Tagging="a=b&c=d", ChecksumSHA256=sha256)
    assert same("get_object_tagging", Key="ü k")[1]["TagSet"] == [
        {"Key": "a", "Value": "b"},
        {"Key": "c", "Value": "d"},
    ]
    same("put_object_tagging", Key="ü k", Tagging={"TagSet": [{"Key": "x", "Value": "y"}]})
    same("get_object_tagging", Key="ü k")
    same("delete_object_tagging", Key="ü k")
    same("get_object_tagging", Key="ü k")
    same("get_object_tagging", Key="not-there")
    answer = same("head_object", Key="ü k", ChecksumMode="ENABLED")
    assert answer[1]["ChecksumSHA256"] == sha256
    answer = same(
        "get_object_attributes",
        Key="ü k",
        ObjectAttributes=["ETag", "Checksum", "ObjectSize", "StorageClass", "ObjectParts"],
    )
    assert answer[1]["Checksum"]["ChecksumSHA256"] == sha256
    assert through.get_object(Bucket=buckets[1], Key="ü k")["Body"].read() == body
    wrong = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    for bucket in buckets:
        with pytest.raises(ClientError) as caught:
            through.put_object(
                Bucket=bucket, Key="bad", Body=body, Tagging="a=b", ChecksumSHA256=wrong
            )
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400


def test_a_large_object_with_tags_streams(same, through, direct, buckets):
    body = bytes(range(256)) * (20 * MIB // 256)
    same("put_object", Key="large", Body=body, Tagging="a=b")
    same("get_object_tagging", Key="large")
    for client in (direct, through):
        assert client.get_object(Bucket=buckets[1], Key="large")["Body"].read() == body


def test_versions(same, direct, through, buckets):
    enabled = {"Status": "Enabled"}
    same("put_bucket_versioning", VersioningConfiguration=enabled)
    assert same("get_bucket_versioning")[1]["Status"] == "Enabled"
    for content in (b"one", b"and two"):
        same("put_object", Key="k", Body=content)
    assert through.get_object(Bucket=buckets[1], Key="k")["Body"].read() == b"and two"
    versions = {
        b: sorted(
            (v["Size"], v["VersionId"]) for v in direct.list_object_versions(Bucket=b)["Versions"]
        )
        for b in buckets
    }
    assert len(same("list_object_versions", Prefix="k")[1]["Versions"]) == 2

    def old(bucket):
        return versions[bucket][0][1]

    assert same("get_object", Key="k", VersionId=old)[2] == b"one"
    assert same("get_object", Key="k", VersionId=old, Range="bytes=1-1")[2] == b"n"
    assert same("head_object", Key="k", VersionId=old)[0] == 200
    same("get_object", Key="k", VersionId="01HZ0000000000000000000000")
    same("get_object_tagging", Key="k", VersionId=old)
    # A copy of the old version becomes the current one, and what was cached is forgotten.
    same("copy_object", Key="k", CopySource=lambda b: f"{b}/k?versionId={old(b)}")
    assert through.get_object(Bucket=buckets[1], Key="k")["Body"].read() == b"one"
    removed = same("delete_object", Key="k", VersionId=old)
    assert removed[0] == 204
    current = direct.list_object_versions(Bucket=buckets[1], Prefix="k")["Versions"]
    assert old(buckets[1]) not in [v["VersionId"] for v in current]


def test_versions_of_one_object_are_removed_by_one_request(direct, through, buckets):
    bucket = buckets[1]
    direct.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for _ in range(5):
        versions = [
            direct.put_object(Bucket=bucket, Key="k", Body=b"%d" % n)["VersionId"] for n in range(5)
        ]
        names = [{"Key": "k", "VersionId": version} for version in versions]
        names.insert(2, {"Key": "other"})
        removed = through.delete_objects(Bucket=bucket, Delete={"Objects": names})
        assert [(d["Key"], d.get("VersionId")) for d in removed["Deleted"]] == [
            (name["Key"], name.get("VersionId")) for name in names
        ]
        assert "Versions" not in direct.list_object_versions(Bucket=bucket, Prefix="k")


def test_uploads_are_the_origins(same, direct, through, buckets):
    large = b"x" * (5 * MIB)
    crc = [base64.b64encode(zlib.crc32(b).to_bytes(4, "big")).decode() for b in (large, b"end")]
    ids = dict.fromkeys(buckets)
    for client, bucket in zip((direct, through), buckets, strict=True):
        ids[bucket] = client.create_multipart_upload(
            Bucket=bucket, Key="up", ChecksumAlgorithm="CRC32", Metadata={"a": "b"}
        )["UploadId"]
    upload = {"Key": "up", "UploadId": ids.get}
    same("upload_part", **upload, PartNumber=1, Body=large, ChecksumAlgorithm="CRC32")
    same("upload_part", **upload, PartNumber=2, Body=b"end", ChecksumCRC32=crc[1])
    same("upload_part", **upload, PartNumber=0, Body=b"")
    same("upload_part", Key="up", UploadId="unknown", PartNumber=1, Body=b"x")
    listed = same("list_parts", **upload)
    assert [p["Size"] for p in listed[1]["Parts"]] == [5 * MIB, 3]
    # One that was begun without the node is also listed through it.
    assert len(through.list_multipart_uploads(Bucket=buckets[0])["Uploads"]) == 1
    assert (
        len(through.list_parts(Bucket=buckets[0], Key="up", UploadId=ids[buckets[0]])["Parts"]) == 2
    )
    etags = [
        p["ETag"]
        for p in direct.list_parts(
            Bucket=buckets[1],
            Key="up",
            UploadId=ids[buckets[1]],
        )["Parts"]
    ]
    parts = [
        {"PartNumber": n + 1, "ETag": etag, "ChecksumCRC32": crc[n]} for n, etag in enumerate(etags)
    ]
    same("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts[::-1]})
    bad = [parts[0], parts[1] | {"ETag": '"00000000000000000000000000000000"'}]
    same("complete_multipart_upload", **upload, MultipartUpload={"Parts": bad})
    same("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
    assert through.get_object(Bucket=buckets[1], Key="up")["Body"].read() == large + b"end"
    for number in (1, 2, 3):
        same("head_object", Key="up", PartNumber=number)
    assert same("get_object", Key="up", PartNumber=2)[2] == b"end"
    same("abort_multipart_upload", Key="up", UploadId="unknown")
    same("get_object_attributes", Key="up", ObjectAttributes=["ObjectParts", "Checksum"])


def test_a_part_that_is_too_small_and_conditions_on_completing(same, direct, through, buckets):
    same("put_object", Key="up", Body=b"already there")
    ids = {
        b: c.create_multipart_upload(Bucket=b, Key="up")["UploadId"]
        for c, b in zip((direct, through), buckets, strict=True)
    }
    upload = {"Key": "up", "UploadId": ids.get}
    parts = []
    for number in (1, 2):
        answer = same("upload_part", **upload, PartNumber=number, Body=b"small")
        parts.append({"PartNumber": number, "ETag": answer[1]["ETag"]})
    answer = same("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
    assert answer[1] == "EntityTooSmall"
    one = {"MultipartUpload": {"Parts": parts[:1]}, "IfNoneMatch": "*"}
    assert same("complete_multipart_upload", **upload, **one)[1] == "PreconditionFailed"
    assert same("abort_multipart_upload", **upload)[0] == 204
    assert through.get_object(Bucket=buckets[1], Key="up")["Body"].read() == b"already there"


def test_conditional_writes_of_some_mb_are_refused_as_such(before, service, direct, buckets):
    """versitygw refuses them before it has read their bodies, and closes the connection."""
    once = s3_client(before.url, retries={"total_max_attempts": 1})
    direct.put_object(Bucket=buckets[1], Key="there", Body=b"already")
    # Of an object that is older than the write, it is known that it is not what was written.
    hour_ago = time.time() - 3600
    os.utime(service.directory / buckets[1] / "there", (hour_ago, hour_ago))
    for size in (1, 3, 7):
        body = bytes(size * MIB)
        for condition in [{"IfNoneMatch": "*"}, {"IfMatch": '"other"'}] * 10:
            with pytest.raises(ClientError) as caught:
                once.put_object(Bucket=buckets[1], Key="there", Body=body, **condition)
            assert caught.value.response["Error"]["Code"] == "PreconditionFailed", size
    assert once.get_object(Bucket=buckets[1], Key="there")["Body"].read() == b"already"


def test_copies_are_the_origins(same, direct, through, buckets):
    same("put_object", Key="from", Body=b"0123456789", Metadata={"a": "b"})
    etag = direct.head_object(Bucket=buckets[0], Key="from")["ETag"]

    def source(bucket):
        return f"{bucket}/from"

    same("copy_object", Key="from", CopySource=source)
    same("copy_object", Key="to", CopySource=source, CopySourceIfMatch=etag)
    same("copy_object", Key="to", CopySource=source, CopySourceIfNoneMatch=etag)
    same("copy_object", Key="to", CopySource=lambda b: f"{b}/not-there")
    same("copy_object", Key="to", CopySource=source, TaggingDirective="REPLACE", Tagging="x=y")
    assert same("get_object_tagging", Key="to")[1]["TagSet"] == [{"Key": "x", "Value": "y"}]
    same("head_object", Key="to", ChecksumMode="ENABLED")
    # Overwritten at the origin while it is cached here.
    assert through.get_object(Bucket=buckets[1], Key="from")["Body"].read() == b"0123456789"
    for bucket in buckets:
        direct.put_object(Bucket=bucket, Key="from", Body=b"another")
    answer = same("copy_object", Key="to", CopySource=source, CopySourceIfMatch=etag)
    assert answer[:2] == (412, "PreconditionFailed")
    ids = {
        b: c.create_multipart_upload(Bucket=b, Key="up")["UploadId"]
        for c, b in zip((direct, through), buckets, strict=True)
    }
    part = {"Key": "up", "UploadId": ids.get, "PartNumber": 1, "CopySource": source}
    for range in ("bytes=0-3", "bytes=3-", "bytes=0-1,2-3", "bytes=0-99", "x"):
        same("upload_part_copy", **part, CopySourceRange=range)


def test_buckets_are_made_and_removed(direct, through):
    location = {"CreateBucketConfiguration": {"LocationConstraint": REGION}}
    assert outcome(lambda: through.create_bucket(Bucket="made", **location), "made")[0] == 200
    for name in ("made", "x", "No_Such_Name"):
        got = [
            outcome(lambda: c.create_bucket(Bucket=name, **location), name)
            for c in (direct, through)
        ]
        assert got[0][:2] == got[1][:2], got
    through.put_object(Bucket="made", Key="k", Body=b"x")
    got = [outcome(lambda: c.delete_bucket(Bucket="made"), "made") for c in (direct, through)]
    assert got[0] == got[1] and got[0][1] == "BucketNotEmpty"
    through.delete_object(Bucket="made", Key="k")
    assert outcome(lambda: through.delete_bucket(Bucket="made"), "made")[0] == 204
    assert outcome(lambda: direct.head_bucket(Bucket="made"), "made")[0] == 404
    assert outcome(lambda: through.get_object(Bucket="made", Key="k"), "made")[:2] == (
        404,
        "NoSuchBucket",
    )


def test_buckets_have_the_dates_of_the_origin(direct, through, buckets):
    there, here = (
        {b["Name"]: b["CreationDate"] for b in client.list_buckets()["Buckets"]}
        for client in (direct, through)
    )
    for bucket in buckets:
        assert abs((there[bucket] - here[bucket]).total_seconds()) < 1


def test_what_was_changed_is_forgotten(direct, through, buckets):
    bucket = buckets[1]
    for i, arguments in enumerate([{"Tagging": "a=b"}, {"Expires": "2030-01-01T00:00:00Z"}]):
        direct.put_object(Bucket=bucket, Key="k", Body=b"old %d" % i)
        through.delete_object(Bucket=bucket, Key="unrelated")
        through.get_object(Bucket=bucket, Key="k")["Body"].read()
        through.put_object(Bucket=bucket, Key="k", Body=b"new %d" % i, **arguments)
        assert through.get_object(Bucket=bucket, Key="k")["Body"].read() == b"new %d" % i


def test_a_policy_comes_first(service, tmp_path):
    """Keys with read and write on a prefix: tags, not ACLs; nothing outside; settings only with
    admin.
    """
    keys = tmp_path / "keys.toml"
    grant = '{{ bucket = "{}", prefix = "{}", actions = [{}] }}'
    keys.write_text(
        '[[keys]]\naccess_key = "AK1"\nsecret_key = "secret-one"\nallow = ['
        + grant.format("policed", "a/", '"read", "write", "list"')
        + ']\n[[keys]]\naccess_key = "AK2"\nsecret_key = "secret-two"\nallow = ['
        + grant.format("policed", "", '"read", "write", "list", "admin"')
        + "]\n"
    )
    keys.chmod(0o600)
    options = [
        "--origin",
        f"s3://?endpoint={service.url}&region={REGION}",
        "--set",
        f"auth.keys_file={keys}",
    ]
    node = Node(service.url, [], tmp_path / "node", options=options)
    try:
        import boto3
        from botocore.config import Config

        def client(access, secret):
            return boto3.client(
                "s3",
                endpoint_url=node.url,
                aws_access_key_id=access,
                aws_secret_access_key=secret,
                config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
            )

        restricted, admin = client("AK1", "secret-one"), client("AK2", "secret-two")
        direct = s3_client(service.url)
        direct.create_bucket(
            Bucket="policed", CreateBucketConfiguration={"LocationConstraint": REGION}
        )
        direct.put_object(Bucket="policed", Key="b/secret", Body=b"secret")
        b = {"Bucket": "policed"}
        restricted.put_object(**b, Key="a/k", Body=b"x" * 100_000, Tagging="t=1")
        assert restricted.get_object_tagging(**b, Key="a/k")["TagSet"]
        assert restricted.list_object_versions(**b, Prefix="a/")["Versions"]
        up = restricted.create_multipart_upload(**b, Key="a/up")["UploadId"]
        restricted.upload_part(**b, Key="a/up", UploadId=up, PartNumber=1, Body=b"part")
        restricted.abort_multipart_upload(**b, Key="a/up", UploadId=up)
        denied = [
            lambda: restricted.put_object(**b, Key="a/k", Body=b"x", ACL="public-read"),
            lambda: restricted.put_object(**b, Key="a/k", Body=b"x", GrantRead="id=1"),
            lambda: restricted.put_object(**b, Key="b/k", Body=b"x", Tagging="t=1"),
            lambda: restricted.put_object_acl(**b, Key="a/k", ACL="public-read"),
            lambda: restricted.get_object_tagging(**b, Key="b/secret"),
            lambda: restricted.get_object(**b, Key="b/secret", VersionId="null"),
            lambda: restricted.copy_object(**b, Key="a/k", CopySource="policed/b/secret"),
            lambda: restricted.list_object_versions(**b),
            lambda: restricted.list_multipart_uploads(**b),
            lambda: restricted.get_bucket_acl(**b),
            lambda: restricted.put_bucket_policy(**b, Policy="{}"),
            lambda: restricted.put_bucket_versioning(
                **b, VersioningConfiguration={"Status": "Enabled"}
            ),
            lambda: restricted.create_bucket(**b),
            lambda: restricted.delete_bucket(**b),
        ]
        for n, call in enumerate(denied):
            assert outcome(call, "policed")[:2] == (403, "AccessDenied"), n
        assert restricted.get_object(**b, Key="a/k")["Body"].read() == b"x" * 100_000
        names = {"Objects": [{"Key": "a/k"}]}
        bypassed = restricted.delete_objects(**b, Delete=names, BypassGovernanceRetention=True)
        assert [e["Code"] for e in bypassed["Errors"]] == ["AccessDenied"]
        assert admin.get_bucket_acl(**b)["Owner"]
        wrong = client("AK1", "not-the-secret")
        assert outcome(lambda: wrong.get_object_tagging(**b, Key="a/k"), "policed")[:2] == (
            403,
            "SignatureDoesNotMatch",
        )
    finally:
        node.stop()


class Recorder(http.server.BaseHTTPRequestHandler):
    """An S3 service that answers everything with an empty document, and writes down what it was
    asked.
    """

    protocol_version = "HTTP/1.1"

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {k.lower(): v for k, v in self.headers.items()}
        self.server.seen.append((self.command, self.path, headers, body))
        content = b"" if self.command == "HEAD" else b"<Answer/>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/xml")
        self.send_header("ETag", '"recorded"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.send_header("x-amz-request-id", "of the origin")
        self.send_header("x-amz-restore", 'ongoing-request="true"')
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What reached the service, and boto3 against a node in front of it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    node = Node(url, ["real"], tmp_path_factory.mktemp("recorded"))
    yield server.seen, s3_client(node.url), node
    node.stop()
    server.shutdown()


def test_what_reaches_the_origin(recorded):
    seen, s3, _ = recorded
    b, k = {"Bucket": "real"}, {"Bucket": "real", "Key": "a b/ü"}
    path = "/real/a%20b/%C3%BC"
    lifecycle = {
        "Rules": [{"ID": "1", "Status": "Enabled", "Prefix": "", "Expiration": {"Days": 1}}]
    }
    secret = base64.b64encode(b"0" * 32).decode()
    for call, method, wanted, headers in [
        (
            lambda: s3.put_bucket_lifecycle_configuration(**b, LifecycleConfiguration=lifecycle),
            "PUT",
            "/real/?lifecycle=",
            {},
        ),
        (lambda: s3.get_bucket_encryption(**b), "GET", "/real/?encryption=", {}),
        (lambda: s3.delete_bucket_website(**b), "DELETE", "/real/?website=", {}),
        (lambda: s3.get_bucket_replication(**b), "GET", "/real/?replication=", {}),
        (
            lambda: s3.restore_object(**k, RestoreRequest={"Days": 1}),
            "POST",
            f"{path}?restore=",
            {},
        ),
        (
            lambda: s3.put_object_legal_hold(**k, LegalHold={"Status": "ON"}),
            "PUT",
            f"{path}?legal-hold=",
            {},
        ),
        (
            lambda: s3.get_object_retention(**k, VersionId="v/1"),
            "GET",
            f"{path}?retention=&versionId=v%2F1",
            {},
        ),
        (
            lambda: s3.put_object(
                **k, Body=b"x", ServerSideEncryption="aws:kms", SSEKMSKeyId="key", ACL="public-read"
            ),
            "PUT",
            path,
            {
                "x-amz-server-side-encryption": "aws:kms",
                "x-amz-server-side-encryption-aws-kms-key-id": "key",
                "x-amz-acl": "public-read",
            },
        ),
        (
            lambda: s3.get_object(**k, SSECustomerAlgorithm="AES256", SSECustomerKey=secret),
            "GET",
            path,
            {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
        ),
        (
            lambda: s3.put_object(**k, Body=b"x", Expires="2030-01-01T00:00:00Z", CacheControl="c"),
            "PUT",
            path,
            {"expires": "Tue, 01 Jan 2030 00:00:00 GMT", "cache-control": "c"},
        ),
        (
            lambda: s3.delete_object(**k, IfMatch='"e"'),
            "DELETE",
            path,
            {"if-match": '"e"'},
        ),
        (
            lambda: s3.delete_object(**k, IfMatchSize=3),
            "DELETE",
            path,
            {"x-amz-if-match-size": "3"},
        ),
        (
            lambda: s3.get_object(**k, ExpectedBucketOwner="123"),
            "GET",
            path,
            {"x-amz-expected-bucket-owner": "123"},
        ),
    ]:
        seen.clear()
        answer = call()
        asked = [r for r in seen if r[:2] == (method, wanted)]
        assert len(asked) == 1, (method, wanted, [r[:2] for r in seen])
        sent = asked[0][2]
        assert headers.items() <= sent.items(), sent
        # Under the node's credentials for this region, and signed as a whole.
        assert f"Credential={ACCESS_KEY}/" in sent["authorization"]
        assert all(n in sent["authorization"] for n in headers if n.startswith("x-amz-")), sent
        assert "x-amz-trailer" not in sent and "aws-chunked" not in sent.get("content-encoding", "")
        metadata = answer["ResponseMetadata"]["HTTPHeaders"]
        assert metadata["x-amz-restore"] == 'ongoing-request="true"'
        assert metadata["x-amz-request-id"] != "of the origin"
    assert SECRET_KEY not in str(seen)


def test_what_goes_with_removals_reaches_the_origin_with_each(recorded, tables):
    seen, s3, _ = recorded
    seen.clear()
    names = {"Objects": [{"Key": "a"}, {"Key": "b", "VersionId": "v/1"}]}
    sent = {"BypassGovernanceRetention": True, "ExpectedBucketOwner": "123"}
    removed = s3.delete_objects(Bucket="real", Delete=names, **sent)
    assert [d["Key"] for d in removed["Deleted"]] == ["a", "b"] and "Errors" not in removed
    assert sorted(r[:2] for r in seen) == [
        ("DELETE", "/real/a"),
        ("DELETE", "/real/b?versionId=v%2F1"),
    ]
    headers = {"x-amz-bypass-governance-retention": "true", "x-amz-expected-bucket-owner": "123"}
    for _, _, told, _ in seen:
        assert headers.items() <= told.items(), told
        assert all(name in told["authorization"] for name in headers), told
    # A directory locks nothing.
    of_a_directory = s3_client(tables.url)
    of_a_directory.put_object(Bucket="tables", Key="removals/k", Body=b"x")
    names = {"Objects": [{"Key": "removals/k"}]}
    with pytest.raises(ClientError) as caught:
        of_a_directory.delete_objects(Bucket="tables", Delete=names, BypassGovernanceRetention=True)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 501
    of_a_directory.delete_object(Bucket="tables", Key="removals/k")


def test_what_nobody_knows_is_not_passed_on(recorded):
    import urllib.error
    import urllib.request

    seen, _, node = recorded
    for path, headers, status in [
        ("/real/k?acl&tagging", {}, 400),
        ("/real/k?tagging&versionId=1&versionId=2", {}, 400),
        ("/real/k?newThing", {}, 501),
        ("/real/k?tagging&newThing=1", {}, 501),
        ("/real/k?acl", {"x-amz-new-thing": "1"}, 501),
        ("/real?session", {}, 501),
    ]:
        seen.clear()
        request = urllib.request.Request(node.url + path, headers=headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        assert (caught.value.code, seen) == (status, []), path


def test_a_presigned_url_of_version_2_says_how_to_sign(tmp_path):
    import boto3
    from botocore.config import Config

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "k").write_bytes(b"content")
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\naccess_key = "AK"\nsecret_key = "secret"\n')
    keys.chmod(0o600)
    options = ["--origin", f"file://{tmp_path / 'data'}", "--set", f"auth.keys_file={keys}"]
    node = Node("", [], tmp_path / "node", options=options)
    try:

        def presigned(**config):
            client = boto3.client(
                "s3",
                endpoint_url=node.url,
                region_name="us-east-1",
                aws_access_key_id="AK",
                aws_secret_access_key="secret",
                config=Config(s3={"addressing_style": "path"}, **config),
            )
            return client.generate_presigned_url(
                "get_object", Params={"Bucket": "data", "Key": "k"}
            )

        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(presigned(signature_version="s3"), timeout=60)
        said = caught.value.read().decode()
        assert caught.value.code == 501 and "s3v4" in said, said
        url = presigned(signature_version="s3v4")
        assert urllib.request.urlopen(url, timeout=60).read() == b"content"
    finally:
        node.stop()


def test_names_to_remove_are_checked_first(through, direct, buckets):
    bucket = buckets[1]
    direct.put_object(Bucket=bucket, Key="k", Body=b"x")
    body = b"<Delete><Object><Key>k</Key></Object></Delete>"
    url = f"{through.meta.endpoint_url}/{bucket}?delete"
    for header, value in [
        ("Content-MD5", "A" * 22 + "=="),
        ("x-amz-checksum-crc32", "AAAAAA=="),
        ("x-amz-checksum-sha256", "A" * 43 + "="),
        ("x-amz-content-sha256", "0" * 64),
    ]:
        request = urllib.request.Request(url, body, {header: value}, method="POST")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request, timeout=60)
        assert direct.head_object(Bucket=bucket, Key="k")["ContentLength"] == 1, header
    assert through.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "k"}]})["Deleted"]
