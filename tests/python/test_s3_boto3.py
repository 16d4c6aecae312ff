"""boto3, unmodified, against the S3 front. What it is told must be what the origin itself would
tell it.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import io
import zlib
from urllib.parse import unquote_plus

import boto3
import dataset
import pytest
import requests
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from conftest import s3_client
from servers import Node


def code_of(caught) -> tuple[int, str]:
    return caught.value.response["ResponseMetadata"]["HTTPStatusCode"], caught.value.response[
        "Error"
    ]["Code"]


@pytest.mark.parametrize(
    "key",
    ["empty", "one", "big/chunk", "big/chunk+1", "big/8MiB", "img/0077.bin", *dataset.ODD_NAMES],
)
def test_get_object(s3, origin_s3, objects, key):
    got, there = (
        s3.get_object(Bucket="train", Key=key),
        origin_s3.head_object(Bucket="train", Key=key),
    )
    assert got["Body"].read() == objects[key]
    assert (got["ContentLength"], got["ETag"], got["LastModified"]) == (
        there["ContentLength"],
        there["ETag"],
        there["LastModified"],
    )
    assert got["ContentType"] == there["ContentType"] and got["AcceptRanges"] == "bytes"
    head = s3.head_object(Bucket="train", Key=key)
    assert (head["ContentLength"], head["ETag"], head["LastModified"]) == (
        there["ContentLength"],
        there["ETag"],
        there["LastModified"],
    )


@pytest.mark.parametrize(
    ("range", "expect"),
    [
        ("bytes=0-0", slice(0, 1)),
        ("bytes=0-99", slice(0, 100)),
        ("bytes=1000000-1100000", slice(1000000, 1100001)),
        ("bytes=8388600-", slice(8388600, None)),
        ("bytes=-17", slice(-17, None)),
        ("bytes=-99999999", slice(0, None)),
        ("bytes=5-99999999", slice(5, None)),
    ],
)
def test_ranges(s3, objects, range, expect):
    data = objects["big/8MiB"]
    got = s3.get_object(Bucket="train", Key="big/8MiB", Range=range)
    body = got["Body"].read()
    assert body == data[expect] and got["ResponseMetadata"]["HTTPStatusCode"] == 206
    start = expect.indices(len(data))[0]
    assert got["ContentRange"] == f"bytes {start}-{start + len(body) - 1}/{len(data)}" and got[
        "ContentLength"
    ] == len(body)


def test_the_first_part_of_an_object_in_one_piece_is_all_of_it(s3, objects):
    got = s3.get_object(Bucket="train", Key="img/0020.bin", PartNumber=1)
    assert (
        got["Body"].read() == objects["img/0020.bin"]
        and got["ResponseMetadata"]["HTTPStatusCode"] == 206
    )
    assert s3.head_object(Bucket="train", Key="empty", PartNumber=1)["ContentLength"] == 0
    with pytest.raises(ClientError) as caught:
        s3.get_object(Bucket="train", Key="img/0020.bin", PartNumber=2)
    assert code_of(caught)[0] in (416, 501)


def test_a_file_is_one_part(tables):
    s3 = s3_client(tables.url)
    s3.put_object(Bucket="tables", Key="one-part", Body=b"0123456789")
    got = s3.get_object(Bucket="tables", Key="one-part", PartNumber=1)
    assert got["Body"].read() == b"0123456789" and got["ContentRange"] == "bytes 0-9/10"
    assert s3.head_object(Bucket="tables", Key="one-part", PartNumber=1)["ContentLength"] == 10
    s3.delete_object(Bucket="tables", Key="one-part")


def test_ranges_that_cannot_be(s3):
    for key, range in [("one", "bytes=1-"), ("empty", "bytes=0-0"), ("one", "bytes=-0")]:
        with pytest.raises(ClientError) as caught:
            s3.get_object(Bucket="train", Key=key, Range=range)
        assert code_of(caught) == (416, "InvalidRange")
    # Syntax that is not understood is ignored, as RFC 9110 says.
    assert s3.get_object(Bucket="train", Key="one", Range="bytes=5-2")["Body"].read() == b"1"


def test_conditionals(s3):
    head = s3.head_object(Bucket="train", Key="img/0009.bin")
    etag, when = head["ETag"], head["LastModified"]
    before, after = when - datetime.timedelta(hours=1), when + datetime.timedelta(hours=1)
    holds = [
        {"IfMatch": etag},
        {"IfNoneMatch": '"other"'},
        {"IfModifiedSince": before},
        {"IfUnmodifiedSince": after},
        {"IfMatch": "*"},
    ]
    for condition in holds:
        assert s3.get_object(Bucket="train", Key="img/0009.bin", **condition)["ETag"] == etag
        assert s3.head_object(Bucket="train", Key="img/0009.bin", **condition)["ETag"] == etag
    for condition, status in [
        ({"IfMatch": '"other"'}, 412),
        ({"IfNoneMatch": etag}, 304),
        ({"IfNoneMatch": "*"}, 304),
        ({"IfModifiedSince": after - datetime.timedelta(hours=1)}, 304),
        ({"IfUnmodifiedSince": before}, 412),
    ]:
        for call in (s3.get_object, s3.head_object):
            with pytest.raises(ClientError) as caught:
                call(Bucket="train", Key="img/0009.bin", **condition)
            assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status, condition


def test_response_headers_can_be_overridden(s3):
    got = s3.get_object(
        Bucket="train",
        Key="one",
        ResponseContentType="text/x-test",
        ResponseContentDisposition="attachment",
        ResponseCacheControl="no-store",
    )
    assert (got["ContentType"], got["ContentDisposition"], got["CacheControl"]) == (
        "text/x-test",
        "attachment",
        "no-store",
    )


def test_what_is_not_there(s3):
    for call, expect in [
        (lambda: s3.get_object(Bucket="train", Key="nope"), (404, "NoSuchKey")),
        (lambda: s3.get_object(Bucket="no-such-bucket", Key="x"), (404, "NoSuchBucket")),
        (lambda: s3.list_objects_v2(Bucket="no-such-bucket"), (404, "NoSuchBucket")),
        (lambda: s3.head_object(Bucket="train", Key="nope"), (404, "404")),
        (lambda: s3.head_bucket(Bucket="no-such-bucket"), (404, "404")),
        (lambda: s3.put_object(Bucket="no-such-bucket", Key="x", Body=b""), (404, "NoSuchBucket")),
    ]:
        with pytest.raises(ClientError) as caught:
            call()
        assert code_of(caught) == expect


def test_errors_carry_a_request_id(s3):
    with pytest.raises(ClientError) as caught:
        s3.get_object(Bucket="train", Key="nope")
    response = caught.value.response
    assert (
        response["ResponseMetadata"]["HTTPHeaders"].get("x-amz-request-id")
        and response["Error"]["Message"]
    )


def test_what_no_origin_can_do_says_so(tables):
    """A directory has no ACLs. (What an S3 origin can do is passed on: test_s3_pass_through.py.)"""
    s3 = s3_client(tables.url)
    key = s3.list_objects_v2(Bucket="tables")["Contents"][0]["Key"]
    for call in (
        lambda: s3.get_bucket_lifecycle_configuration(Bucket="tables"),
        lambda: s3.put_bucket_policy(Bucket="tables", Policy="{}"),
        lambda: s3.put_object_acl(Bucket="tables", Key=key, ACL="private"),
        lambda: s3.get_bucket_replication(Bucket="tables"),
        lambda: s3.restore_object(Bucket="tables", Key=key, RestoreRequest={}),
    ):
        with pytest.raises(ClientError) as caught:
            call()
        assert code_of(caught) == (501, "NotImplemented")
    assert s3.get_object(Bucket="tables", Key=key)["Body"].read()


def test_a_bucket_that_need_not_lock_its_objects_is_made(tmp_path):
    (tmp_path / "b").mkdir()
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'b'}/*"])
    try:
        s3 = s3_client(node.url)
        # rclone says so with each bucket that it makes.
        s3.create_bucket(Bucket="made", ObjectLockEnabledForBucket=False)
        assert (tmp_path / "b" / "made").is_dir()
        with pytest.raises(ClientError) as caught:
            s3.create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
        assert code_of(caught) == (501, "NotImplemented")
    finally:
        node.stop()


def test_put_get_delete(s3, origin_s3, scratch):
    key = f"{scratch}/ü +%/k"
    put = s3.put_object(
        Bucket="scratch",
        Key=key,
        Body=b"first",
        ContentType="text/plain",
        Metadata={"colour": "blue"},
        CacheControl="no-cache",
    )
    assert put["ETag"] == f'"{hashlib.md5(b"first").hexdigest()}"'
    for client in (s3, origin_s3):
        got = client.get_object(Bucket="scratch", Key=key)
        assert (
            got["Body"].read() == b"first"
            and got["ContentType"] == "text/plain"
            and got["Metadata"] == {"colour": "blue"}
        )
    s3.put_object(Bucket="scratch", Key=key, Body=b"second, longer")
    assert s3.get_object(Bucket="scratch", Key=key)["Body"].read() == b"second, longer"
    assert s3.head_object(Bucket="scratch", Key=key)["ContentLength"] == 14
    s3.delete_object(Bucket="scratch", Key=key)
    for client in (s3, origin_s3):
        with pytest.raises(ClientError) as caught:
            client.get_object(Bucket="scratch", Key=key)
        assert code_of(caught) == (404, "NoSuchKey")
    # Deleting something that does not exist succeeds.
    assert s3.delete_object(Bucket="scratch", Key=key)["ResponseMetadata"]["HTTPStatusCode"] == 204


def test_conditional_puts(s3, scratch):
    s3.put_object(Bucket="scratch", Key=scratch, Body=b"1", IfNoneMatch="*")
    with pytest.raises(ClientError) as caught:
        s3.put_object(Bucket="scratch", Key=scratch, Body=b"2", IfNoneMatch="*")
    assert code_of(caught) == (412, "PreconditionFailed")
    assert s3.get_object(Bucket="scratch", Key=scratch)["Body"].read() == b"1"


def test_an_etag_without_quotes_is_a_condition(tables):
    s3, k = s3_client(tables.url), {"Bucket": "tables", "Key": "conditions/k"}

    def bare():
        return s3.head_object(**k)["ETag"].strip('"')

    s3.put_object(**k, Body=b"first")
    old = bare()
    assert "." in old
    s3.put_object(**k, Body=b"second", IfMatch=old)
    s3.put_object(Bucket="tables", Key="conditions/source", Body=b"copied")
    s3.copy_object(**k, CopySource="tables/conditions/source", IfMatch=bare())
    upload = k | {"UploadId": s3.create_multipart_upload(**k)["UploadId"]}
    part = {"PartNumber": 1, "ETag": s3.upload_part(**upload, PartNumber=1, Body=b"third")["ETag"]}
    parts = {"MultipartUpload": {"Parts": [part]}}
    for call in (
        lambda: s3.put_object(**k, Body=b"late", IfMatch=old),
        lambda: s3.copy_object(**k, CopySource="tables/conditions/source", IfMatch=old),
        lambda: s3.complete_multipart_upload(**upload, **parts, IfMatch=old),
    ):
        with pytest.raises(ClientError) as caught:
            call()
        assert code_of(caught) == (412, "PreconditionFailed")
    assert s3.get_object(**k)["Body"].read() == b"copied"
    s3.complete_multipart_upload(**upload, **parts, IfMatch=bare())
    assert s3.get_object(**k)["Body"].read() == b"third"
    for key in ("conditions/k", "conditions/source"):
        s3.delete_object(Bucket="tables", Key=key)


@pytest.mark.parametrize("algorithm", ["CRC32", "SHA1", "SHA256"])
@pytest.mark.parametrize("streamed", [False, True])
def test_puts_with_checksums_in_headers_and_trailers(s3, scratch, algorithm, streamed):
    body = dataset.noise(300_000)
    s3.put_object(
        Bucket="scratch",
        Key=scratch,
        Body=io.BytesIO(body) if streamed else body,
        ChecksumAlgorithm=algorithm,
    )
    assert s3.get_object(Bucket="scratch", Key=scratch)["Body"].read() == body


def test_a_wrong_checksum_is_refused(s3, scratch):
    for wrong in (
        {"ContentMD5": base64.b64encode(hashlib.md5(b"other").digest()).decode()},
        {"ChecksumSHA256": base64.b64encode(hashlib.sha256(b"other").digest()).decode()},
        {"ChecksumCRC32": base64.b64encode(zlib.crc32(b"other").to_bytes(4, "big")).decode()},
    ):
        with pytest.raises(ClientError) as caught:
            s3.put_object(Bucket="scratch", Key=scratch, Body=b"this", **wrong)
        assert code_of(caught)[0] == 400
        with pytest.raises(ClientError):
            s3.head_object(Bucket="scratch", Key=scratch)


def test_a_part_that_is_sent_to_a_directory_again_keeps_its_etag(tables):
    s3, k = s3_client(tables.url), {"Bucket": "tables", "Key": "again/k"}
    upload = k | {"UploadId": s3.create_multipart_upload(**k)["UploadId"]}
    etags = [s3.upload_part(**upload, PartNumber=1, Body=b"same")["ETag"] for _ in range(2)]
    assert etags[0] == etags[1]
    parts = {"MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": etags[0]}]}}
    s3.upload_part(**upload, PartNumber=1, Body=b"else")
    with pytest.raises(ClientError) as caught:
        s3.complete_multipart_upload(**upload, **parts)
    assert code_of(caught) == (400, "InvalidPart")
    s3.upload_part(**upload, PartNumber=1, Body=b"same")
    s3.complete_multipart_upload(**upload, **parts)
    assert s3.get_object(**k)["Body"].read() == b"same"
    s3.delete_object(**k)


@pytest.mark.parametrize("streamed", [False, True])
def test_newer_checksums_are_checked_over_a_directory(tables, streamed):
    s3, k = s3_client(tables.url), {"Bucket": "tables", "Key": "sums/k"}
    body = b"hello" * 100_000
    sha512 = base64.b64encode(hashlib.sha512(body).digest()).decode()
    sent = io.BytesIO(body) if streamed else body
    put = s3.put_object(**k, Body=sent, ChecksumAlgorithm="SHA512")
    assert put["ChecksumSHA512"] == sha512
    assert s3.get_object(**k)["Body"].read() == body
    # As the SDKs of AWS compute them.
    right = {
        "MD5": "XUFAKrxLKna5cZ2REBfFkg==",
        "XXHASH64": "JseCfYifbaM=",
        "XXHASH3": "lVXoVVxi3P0=",
        "XXHASH128": "tenBrQcbPn/Hec+qXlI4GA==",
    }
    for name, value in right.items():
        s3.put_object(**k, Body=b"hello", **{f"Checksum{name}": value})
        with pytest.raises(ClientError) as caught:
            s3.put_object(**k, Body=b"other", **{f"Checksum{name}": value})
        assert code_of(caught) == (400, "BadDigest")
    assert s3.get_object(**k)["Body"].read() == b"hello"
    s3.delete_object(**k)


@pytest.mark.parametrize("key", [f"img/{i:04}.bin" for i in range(3)] + ["big/8MiB"])
def test_checksum_mode_is_harmless(s3, objects, key):
    assert (
        s3.get_object(Bucket="train", Key=key, ChecksumMode="ENABLED")["Body"].read()
        == objects[key]
    )


def test_multipart_upload(s3, origin_s3, scratch):
    parts = [dataset.noise(5 << 20, 1), dataset.noise(5 << 20, 2), dataset.noise(12345, 3)]
    upload = s3.create_multipart_upload(
        Bucket="scratch", Key=scratch, ContentType="text/x-parts", Metadata={"a": "b"}
    )["UploadId"]
    etags = {}
    for number in (2, 3, 1):
        etags[number] = s3.upload_part(
            Bucket="scratch",
            Key=scratch,
            UploadId=upload,
            PartNumber=number,
            Body=parts[number - 1],
        )["ETag"]
    listed = s3.list_parts(Bucket="scratch", Key=scratch, UploadId=upload)["Parts"]
    assert [(p["PartNumber"], p["Size"], p["ETag"]) for p in listed] == [
        (n, len(parts[n - 1]), etags[n]) for n in (1, 2, 3)
    ]
    uploads = s3.list_multipart_uploads(Bucket="scratch", Prefix=scratch)["Uploads"]
    assert [(u["Key"], u["UploadId"]) for u in uploads] == [(scratch, upload)]
    done = [{"PartNumber": n, "ETag": etags[n]} for n in (1, 2, 3)]
    finished = s3.complete_multipart_upload(
        Bucket="scratch", Key=scratch, UploadId=upload, MultipartUpload={"Parts": done}
    )
    assert finished["ETag"].endswith('-3"')
    for client in (s3, origin_s3):
        got = client.get_object(Bucket="scratch", Key=scratch)
        assert (
            got["Body"].read() == b"".join(parts)
            and got["ETag"] == finished["ETag"]
            and got["Metadata"] == {"a": "b"}
        )


def test_a_multipart_upload_that_is_aborted_leaves_nothing(s3, scratch):
    upload = s3.create_multipart_upload(Bucket="scratch", Key=scratch)["UploadId"]
    etag = s3.upload_part(Bucket="scratch", Key=scratch, UploadId=upload, PartNumber=1, Body=b"x")[
        "ETag"
    ]
    s3.abort_multipart_upload(Bucket="scratch", Key=scratch, UploadId=upload)
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="scratch", Prefix=scratch)
    for call in (
        lambda: s3.upload_part(
            Bucket="scratch", Key=scratch, UploadId=upload, PartNumber=2, Body=b"x"
        ),
        lambda: s3.complete_multipart_upload(
            Bucket="scratch",
            Key=scratch,
            UploadId=upload,
            MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]},
        ),
    ):
        with pytest.raises(ClientError) as caught:
            call()
        assert code_of(caught) == (404, "NoSuchUpload")


def test_uploads_are_listed_with_encoded_names(tables):
    s3 = s3_client(tables.url)
    key = "uploads/a b+ü"
    upload = s3.create_multipart_upload(Bucket="tables", Key=key)["UploadId"]
    listed = {"Bucket": "tables", "Prefix": "uploads/a b"}
    (plain,) = s3.list_multipart_uploads(**listed)["Uploads"]
    assert (plain["Key"], plain["UploadId"]) == (key, upload)
    (encoded,) = s3.list_multipart_uploads(**listed, EncodingType="url")["Uploads"]
    assert (encoded["Key"], encoded["UploadId"]) == ("uploads/a%20b%2B%C3%BC", upload)
    s3.abort_multipart_upload(Bucket="tables", Key=key, UploadId=upload)


def test_a_bucket_that_is_made_anew_has_no_uploads(tmp_path):
    (tmp_path / "b").mkdir()
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'b'}/*"])
    try:
        s3 = s3_client(node.url)
        s3.create_bucket(Bucket="made")
        s3.create_multipart_upload(Bucket="made", Key="k")
        s3.delete_bucket(Bucket="made")
        s3.create_bucket(Bucket="made")
        assert "Uploads" not in s3.list_multipart_uploads(Bucket="made")
    finally:
        node.stop()


def test_a_part_without_its_number_does_not_replace_the_object(tables):
    s3 = s3_client(tables.url)
    s3.put_object(Bucket="tables", Key="uploads/whole", Body=b"whole")
    url = s3.generate_presigned_url("put_object", {"Bucket": "tables", "Key": "uploads/whole"})
    plain = url.split("?")[0]
    assert requests.put(f"{plain}?uploadId=1", data=b"part").status_code == 501
    assert s3.get_object(Bucket="tables", Key="uploads/whole")["Body"].read() == b"whole"
    s3.delete_object(Bucket="tables", Key="uploads/whole")


def test_upload_part_copy(s3, scratch, objects):
    upload = s3.create_multipart_upload(Bucket="scratch", Key=scratch)["UploadId"]
    source = {"Bucket": "train", "Key": "big/8MiB"}
    parts = []
    for number, span in enumerate(["bytes=0-5242879", "bytes=5242880-8388607"], 1):
        copied = s3.upload_part_copy(
            Bucket="scratch",
            Key=scratch,
            UploadId=upload,
            PartNumber=number,
            CopySource=source,
            CopySourceRange=span,
        )
        parts.append({"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]})
    s3.complete_multipart_upload(
        Bucket="scratch", Key=scratch, UploadId=upload, MultipartUpload={"Parts": parts}
    )
    assert s3.get_object(Bucket="scratch", Key=scratch)["Body"].read() == objects["big/8MiB"]


def test_managed_transfers(s3, scratch, tmp_path):
    data = dataset.noise(20_000_000)
    (tmp_path / "up").write_bytes(data)
    s3.upload_file(str(tmp_path / "up"), "scratch", scratch, ExtraArgs={"ContentType": "x/y"})
    s3.download_file("scratch", scratch, str(tmp_path / "down"))
    assert (tmp_path / "down").read_bytes() == data
    out = io.BytesIO()
    s3.download_fileobj("scratch", scratch, out)
    assert out.getvalue() == data


@pytest.mark.parametrize("payload", ["signed", "unsigned"])
@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 1_000_000])
def test_signed_and_unsigned_payloads(node, scratch, payload, size):
    s3 = s3_client(
        node.url,
        s3={"addressing_style": "path", "payload_signing_enabled": payload == "signed"},
        request_checksum_calculation="when_required",
    )
    body = dataset.noise(size)
    s3.put_object(Bucket="scratch", Key=scratch, Body=body)
    assert s3.get_object(Bucket="scratch", Key=scratch)["Body"].read() == body


def test_copy(s3, origin_s3, scratch, objects):
    s3.put_object(
        Bucket="scratch",
        Key=f"{scratch}/from ü",
        Body=b"original",
        Metadata={"x": "1"},
        ContentType="a/b",
    )
    copied = s3.copy_object(
        Bucket="scratch",
        Key=f"{scratch}/to",
        CopySource={"Bucket": "scratch", "Key": f"{scratch}/from ü"},
    )
    got = s3.get_object(Bucket="scratch", Key=f"{scratch}/to")
    assert got["Body"].read() == b"original" and got["ETag"] == copied["CopyObjectResult"]["ETag"]
    assert got["Metadata"] == {"x": "1"} and got["ContentType"] == "a/b"
    s3.copy_object(
        Bucket="scratch",
        Key=f"{scratch}/replaced",
        CopySource=f"scratch/{scratch}/to",
        MetadataDirective="REPLACE",
        Metadata={"y": "2"},
    )
    assert s3.head_object(Bucket="scratch", Key=f"{scratch}/replaced")["Metadata"] == {"y": "2"}
    s3.copy_object(
        Bucket="scratch",
        Key=f"{scratch}/across",
        CopySource={"Bucket": "train", "Key": "big/chunk+1"},
    )
    assert (
        origin_s3.get_object(Bucket="scratch", Key=f"{scratch}/across")["Body"].read()
        == objects["big/chunk+1"]
    )
    with pytest.raises(ClientError) as caught:
        s3.copy_object(
            Bucket="scratch", Key=f"{scratch}/no", CopySource={"Bucket": "train", "Key": "nope"}
        )
    assert code_of(caught) == (404, "NoSuchKey")


def test_a_plus_sign_in_the_source_of_a_copy_is_a_space(node, tables, scratch):
    """As for S3. s5cmd writes spaces so; those who mean a plus sign encode it."""
    for url, bucket in ((node.url, "scratch"), (tables.url, "tables")):
        client = s3_client(url)
        for name in ("a b", "a+b"):
            client.put_object(Bucket=bucket, Key=f"{scratch}/{name}", Body=name.encode())

        def write_spaces_so(params, **_):
            source = params["headers"]["x-amz-copy-source"]
            params["headers"]["x-amz-copy-source"] = source.replace("%20", "+")

        client.meta.events.register("before-call.s3.CopyObject", write_spaces_so)
        for name in ("a b", "a+b"):
            source = {"Bucket": bucket, "Key": f"{scratch}/{name}"}
            client.copy_object(Bucket=bucket, Key=f"{scratch}/to", CopySource=source)
            got = client.get_object(Bucket=bucket, Key=f"{scratch}/to")["Body"].read()
            assert got == name.encode()


def test_delete_objects(s3, origin_s3, scratch):
    keys = [f"{scratch}/{i} ü&<>" for i in range(30)]
    for key in keys:
        s3.put_object(Bucket="scratch", Key=key, Body=b"x")
    done = s3.delete_objects(
        Bucket="scratch",
        Delete={"Objects": [{"Key": k} for k in keys[:20]] + [{"Key": f"{scratch}/never"}]},
    )
    assert (
        sorted(d["Key"] for d in done["Deleted"]) == sorted([*keys[:20], f"{scratch}/never"])
        and "Errors" not in done
    )
    assert [
        o["Key"]
        for o in origin_s3.list_objects_v2(Bucket="scratch", Prefix=f"{scratch}/")["Contents"]
    ] == sorted(keys[20:])
    quiet = s3.delete_objects(
        Bucket="scratch", Delete={"Objects": [{"Key": k} for k in keys[20:]], "Quiet": True}
    )
    assert "Deleted" not in quiet
    for key in keys:
        with pytest.raises(ClientError):
            s3.get_object(Bucket="scratch", Key=key)


def test_get_object_attributes(s3, origin_s3):
    wanted = ["ETag", "ObjectSize", "StorageClass"]
    got = s3.get_object_attributes(Bucket="train", Key="img/0030.bin", ObjectAttributes=wanted)
    there = origin_s3.head_object(Bucket="train", Key="img/0030.bin")
    assert (got["ETag"].strip('"'), got["ObjectSize"], got["StorageClass"]) == (
        there["ETag"].strip('"'),
        there["ContentLength"],
        "STANDARD",
    )
    with pytest.raises(ClientError) as caught:
        s3.get_object_attributes(Bucket="train", Key="nope", ObjectAttributes=wanted)
    assert code_of(caught)[0] == 404


def same_listing(ours: dict, theirs: dict) -> None:
    def shape(page):
        contents = [
            (c["Key"], c["Size"], c["ETag"], c["LastModified"]) for c in page.get("Contents", [])
        ]
        return (
            contents,
            [p["Prefix"] for p in page.get("CommonPrefixes", [])],
            page["IsTruncated"],
            page.get("KeyCount"),
        )

    assert shape(ours) == shape(theirs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"Prefix": "img/"},
        {"Prefix": "img/00", "MaxKeys": 7},
        {"Delimiter": "/"},
        {"Prefix": "odd/", "Delimiter": "/"},
        {"Prefix": "nothing"},
        {"Prefix": "img/", "StartAfter": "img/0100.bin"},
        {"MaxKeys": 0},
        {"Delimiter": "0"},
    ],
)
def test_list_v2(s3, origin_s3, options):
    ours, theirs = (
        s3.list_objects_v2(Bucket="train", **options),
        origin_s3.list_objects_v2(Bucket="train", **options),
    )
    if options.get("MaxKeys") == 0:
        assert "Contents" not in ours and ours["KeyCount"] == 0
        return
    same_listing(ours, theirs)


def test_list_with_encoded_keys(s3, objects):
    page = s3.list_objects_v2(Bucket="train", Prefix="odd/", EncodingType="url")
    assert page["EncodingType"] == "url"
    assert sorted(unquote_plus(c["Key"]) for c in page["Contents"]) == sorted(
        k for k in objects if k.startswith("odd/")
    )


@pytest.mark.parametrize("page_size", [1, 13, 1000])
@pytest.mark.parametrize("version", ["list_objects", "list_objects_v2"])
def test_list_by_pages(s3, objects, version, page_size):
    pages = s3.get_paginator(version).paginate(
        Bucket="train", Prefix="img/01", PaginationConfig={"PageSize": page_size}
    )
    keys = [c["Key"] for page in pages for c in page.get("Contents", [])]
    assert keys == sorted(k for k in objects if k.startswith("img/01"))


@pytest.mark.parametrize("version", ["list_objects", "list_objects_v2"])
def test_list_directories_by_pages(s3, objects, version):
    pages = list(
        s3.get_paginator(version).paginate(
            Bucket="train", Delimiter="/", PaginationConfig={"PageSize": 2}
        )
    )
    prefixes = [p["Prefix"] for page in pages for p in page.get("CommonPrefixes", [])]
    keys = [c["Key"] for page in pages for c in page.get("Contents", [])]
    assert prefixes == sorted(
        {k.split("/")[0] + "/" for k in objects if "/" in k}
    ) and keys == sorted(k for k in objects if "/" not in k)


def test_list_v1_markers(s3, objects):
    page = s3.list_objects(Bucket="train", Prefix="img/", Marker="img/0150.bin", MaxKeys=10)
    assert [c["Key"] for c in page["Contents"]] == [
        f"img/0{i}.bin" for i in range(151, 161)
    ] and page["IsTruncated"]


def test_buckets(s3):
    assert {"train", "other", "scratch"} <= {b["Name"] for b in s3.list_buckets()["Buckets"]}
    assert s3.head_bucket(Bucket="train")["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert "LocationConstraint" in s3.get_bucket_location(Bucket="train")


def test_a_directory_tells_when_it_was_made(tables):
    listed = s3_client(tables.url).list_buckets()["Buckets"]
    made = {b["Name"]: b["CreationDate"] for b in listed}
    age = datetime.datetime.now(datetime.UTC) - made["tables"]
    assert datetime.timedelta(minutes=-1) < age < datetime.timedelta(days=1)


def test_presigned_urls(s3, scratch, objects):
    url = s3.generate_presigned_url(
        "get_object", Params={"Bucket": "train", "Key": "odd/ünïcödé/日本語.txt"}, ExpiresIn=60
    )
    assert requests.get(url).content == objects["odd/ünïcödé/日本語.txt"]
    ranged = requests.get(url, headers={"Range": "bytes=1-3"})
    assert ranged.status_code == 206 and ranged.content == objects["odd/ünïcödé/日本語.txt"][1:4]
    put = s3.generate_presigned_url(
        "put_object", Params={"Bucket": "scratch", "Key": scratch}, ExpiresIn=60
    )
    assert requests.put(put, data=b"by url").status_code == 200
    assert s3.get_object(Bucket="scratch", Key=scratch)["Body"].read() == b"by url"
    named = s3.generate_presigned_url(
        "get_object",
        Params={
            "Bucket": "train",
            "Key": "one",
            "ResponseContentDisposition": 'attachment; filename="x"',
        },
    )
    assert requests.get(named).headers["Content-Disposition"] == 'attachment; filename="x"'


def test_x_cache_says_where_the_bytes_came_from(s3, origin_s3, scratch):
    origin_s3.put_object(Bucket="scratch", Key=scratch, Body=b"x" * 1000)
    seen = [
        s3.get_object(Bucket="scratch", Key=scratch)["ResponseMetadata"]["HTTPHeaders"]["x-cache"]
        for _ in range(2)
    ]
    assert seen == ["MISS", "HIT"]


def test_virtual_host_style(origin, tmp_path, objects):
    """The bucket in the Host header, as clients use it that cannot be told otherwise."""
    node = Node(origin.url, ["train"], tmp_path, options=["--set", 'listen.hostnames=["s3.test"]'])
    try:
        for host, path, expect in [
            ("train.s3.test", "/img/0011.bin", objects["img/0011.bin"]),
            (f"train.s3.test:{node.port}", "/one", b"1"),
            ("s3.test", "/train/one", b"1"),
        ]:
            answer = requests.get(f"{node.url}{path}", headers={"Host": host})
            assert (answer.status_code, answer.content) == (200, expect)
    finally:
        node.stop()


class TestWithKeys:
    """A node that requires signatures."""

    @pytest.fixture(scope="class")
    @classmethod
    def node(cls, origin, tmp_path_factory):
        keys = '[{access_key = "frontkey", secret_key = "frontsecret"}]'
        node = Node(
            origin.url,
            ["train", "scratch"],
            tmp_path_factory.mktemp("keys"),
            options=["--set", f"auth.keys={keys}"],
        )
        yield node
        node.stop()

    @staticmethod
    def client(node, key="frontkey", secret="frontsecret", **config):
        options = {"s3": {"addressing_style": "path"}, "retries": {"max_attempts": 1}} | config
        return boto3.client(
            "s3",
            endpoint_url=node.url,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            config=Config(**options),
        )

    def test_a_right_signature_is_let_in(self, node, objects):
        s3 = self.client(node)
        for key in ("one", *dataset.ODD_NAMES):
            assert s3.get_object(Bucket="train", Key=key)["Body"].read() == objects[key]
        url = s3.generate_presigned_url(
            "get_object", Params={"Bucket": "train", "Key": "odd/plus+plus.txt"}, ExpiresIn=60
        )
        assert requests.get(url).content == objects["odd/plus+plus.txt"]

    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize("signing", [False, True])
    def test_writes_signed_in_every_form(self, node, streamed, signing):
        s3 = self.client(node, s3={"addressing_style": "path", "payload_signing_enabled": signing})
        body = dataset.noise(200_000)
        s3.put_object(
            Bucket="scratch",
            Key="signed",
            Body=io.BytesIO(body) if streamed else body,
            ChecksumAlgorithm="CRC32",
        )
        assert s3.get_object(Bucket="scratch", Key="signed")["Body"].read() == body

    def test_others_are_not(self, node):
        for client, code in [
            (self.client(node, key="unknown"), "InvalidAccessKeyId"),
            (self.client(node, secret="wrong"), "SignatureDoesNotMatch"),
            (self.client(node, signature_version=UNSIGNED), "AccessDenied"),
        ]:
            for call in (
                lambda client=client: client.get_object(Bucket="train", Key="one"),
                lambda client=client: client.list_objects_v2(Bucket="train"),
                lambda client=client: client.put_object(Bucket="scratch", Key="x", Body=b""),
            ):
                with pytest.raises(ClientError) as caught:
                    call()
                assert code_of(caught) == (403, code)

    def test_a_presigned_url_that_was_changed_or_is_over(self, node):
        s3 = self.client(node)
        url = s3.generate_presigned_url(
            "get_object", Params={"Bucket": "train", "Key": "one"}, ExpiresIn=60
        )
        assert requests.get(url.replace("/one?", "/empty?")).status_code == 403
        assert requests.get(url + "&response-content-type=x").status_code == 403
        old = s3.generate_presigned_url(
            "get_object", Params={"Bucket": "train", "Key": "one"}, ExpiresIn=1
        )
        import time

        time.sleep(2.5)
        assert requests.get(old).status_code == 403

    def test_a_header_left_out_of_the_signature_is_refused(self, node):
        """A proxy in between could add it: `x-amz-*` headers count only if they are signed."""
        s3 = self.client(node)

        def add(request, **_):
            request.headers["x-amz-copy-source"] = "/train/one"

        s3.meta.events.register("before-send.s3.PutObject", add)
        with pytest.raises(ClientError) as caught:
            s3.put_object(Bucket="scratch", Key="smuggled", Body=b"body")
        assert code_of(caught)[0] == 403
