"""The AWS command line, unmodified, against the S3 front."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import dataset
import pytest
import requests


@pytest.fixture
def aws(node, tmp_path):
    program = Path(sys.executable).parent / "aws"
    env = os.environ | {
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "PYTHONWARNINGS": "ignore",
    }

    def run(*arguments: str, stdin: bytes | None = None, status: int = 0) -> bytes:
        command = [sys.executable, str(program), "--endpoint-url", node.url, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, env=env, timeout=120)
        assert done.returncode == status, (arguments, done.returncode, done.stderr.decode())
        return done.stdout if status == 0 else done.stderr

    return run


def test_cp_ls_rm(aws, scratch, tmp_path, origin_s3):
    data = dataset.noise(20_000_000)
    (tmp_path / "file").write_bytes(data)
    aws("s3", "cp", "--no-progress", str(tmp_path / "file"), f"s3://scratch/{scratch}/file")
    aws("s3", "cp", "--no-progress", f"s3://scratch/{scratch}/file", str(tmp_path / "back"))
    assert (
        (tmp_path / "back").read_bytes()
        == data
        == origin_s3.get_object(Bucket="scratch", Key=f"{scratch}/file")["Body"].read()
    )
    aws("s3", "cp", "-", f"s3://scratch/{scratch}/from stdin ü", stdin=b"piped")
    assert aws("s3", "cp", f"s3://scratch/{scratch}/from stdin ü", "-") == b"piped"
    aws("s3", "cp", f"s3://scratch/{scratch}/file", f"s3://scratch/{scratch}/copy")
    listing = aws("s3", "ls", f"s3://scratch/{scratch}/").decode()
    assert [line.split(None, 3)[2:] for line in listing.splitlines()] == [
        ["20000000", "copy"],
        ["20000000", "file"],
        ["5", "from stdin ü"],
    ]
    aws("s3", "mv", f"s3://scratch/{scratch}/copy", f"s3://scratch/{scratch}/moved")
    aws("s3", "rm", "--recursive", f"s3://scratch/{scratch}/")
    aws("s3", "ls", f"s3://scratch/{scratch}/", status=1)


def test_ls(aws):
    buckets = [line.split()[-1] for line in aws("s3", "ls").decode().splitlines()]
    assert {"train", "other", "scratch"} <= set(buckets)
    assert b"PRE img/" in aws("s3", "ls", "s3://train/")
    summary = aws("s3", "ls", "--recursive", "--summarize", "s3://train/img/").decode()
    assert "Total Objects: 200" in summary


def test_sync_down_and_up(aws, scratch, tmp_path, objects):
    aws("s3", "sync", "--no-progress", "s3://train/img/", str(tmp_path / "img"))
    assert {f"img/{p.name}": p.read_bytes() for p in (tmp_path / "img").iterdir()} == {
        k: v for k, v in objects.items() if k.startswith("img/")
    }
    # The second time there is nothing to do.
    assert aws("s3", "sync", "--no-progress", "s3://train/img/", str(tmp_path / "img")) == b""
    aws("s3", "sync", "--no-progress", str(tmp_path / "img"), f"s3://scratch/{scratch}/")
    (tmp_path / "img" / "0000.bin").unlink()
    (tmp_path / "img" / "new").write_bytes(b"new")
    aws(
        "s3", "sync", "--no-progress", "--delete", str(tmp_path / "img"), f"s3://scratch/{scratch}/"
    )
    listing = aws("s3", "ls", f"s3://scratch/{scratch}/").decode()
    assert " new\n" in listing and "0000.bin" not in listing and listing.count("\n") == 200


def test_presign(aws):
    url = aws("s3", "presign", "s3://train/one").decode().strip()
    assert requests.get(url).content == b"1"


def test_s3api(aws, tmp_path, objects):
    head = json.loads(aws("s3api", "head-object", "--bucket", "train", "--key", "img/0005.bin"))
    assert head["ContentLength"] == len(objects["img/0005.bin"])
    part = json.loads(
        aws(
            "s3api",
            "get-object",
            "--bucket",
            "train",
            "--key",
            "big/8MiB",
            "--range",
            "bytes=100-199",
            str(tmp_path / "part"),
        )
    )
    assert (
        part["ContentRange"] == f"bytes 100-199/{8 << 20}"
        and (tmp_path / "part").read_bytes() == objects["big/8MiB"][100:200]
    )
    keys = json.loads(
        aws(
            "s3api",
            "list-objects-v2",
            "--bucket",
            "train",
            "--prefix",
            "img/00",
            "--page-size",
            "7",
            "--query",
            "Contents[].Key",
        )
    )
    assert keys == [f"img/00{i:02}.bin" for i in range(100)]
    assert b"404" in aws("s3api", "head-object", "--bucket", "train", "--key", "nope", status=255)


def test_what_is_not_there(aws):
    assert b"404" in aws("s3", "cp", "s3://train/nope", "-", status=1)
    assert b"NoSuchBucket" in aws("s3", "ls", "s3://no-such-bucket/", status=255)
