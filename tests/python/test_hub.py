"""`hf://` beside the Hub's own library, at a server that speaks the Hub's API (`hub.py`)."""

from __future__ import annotations

import random
import re
import time

import forebay
import hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi, HfFileSystem
from servers import Node, s3_client


def parquet(first: int, rows: int) -> bytes:
    out = pa.BufferOutputStream()
    numbers = list(range(first, first + rows))
    texts = [f"text {n} " * 20 for n in numbers]
    pq.write_table(pa.table({"id": numbers, "text": texts}), out, row_group_size=50)
    return out.getvalue().to_pybytes()


@pytest.fixture
def the_hub():
    rng = random.Random(4)
    files = {f"data/train-{n:05d}.parquet": parquet(200 * n, 200) for n in range(4)}
    files |= {
        "README.md": b"# Some numbers\n",
        "data.json": b"{}",
        "empty": b"",
        "large.bin": rng.randbytes(30 << 20),
        "a b/\xfc+%.txt": b"of an odd name",
        "deep/er/than/that.txt": b"deep",
    }
    one = hub.Hub("some-lab/numbers", files)
    yield one
    one.stop()


@pytest.fixture
def start(tmp_path, the_hub):
    nodes = []

    def start(
        url: str = "hf://datasets/some-lab/numbers", env=None, freshness=None, **setting
    ) -> Node:
        query = "&".join(f"{k}={v}" for k, v in {"endpoint": the_hub.url, **setting}.items())
        options = ["--origin", f"{url}?{query}"]
        options += ["--freshness", freshness] if freshness else []
        home = {"HF_HOME": str(tmp_path / "none"), "HF_TOKEN": "", "HF_ENDPOINT": ""}
        directory = tmp_path / str(len(nodes))
        nodes.append(Node("", [], directory, options=options, env={**home, **(env or {})}))
        return nodes[-1]

    yield start
    for node in nodes:
        node.stop()


def listed(node: Node, **what) -> list[tuple[str, int, str]]:
    pages = s3_client(node.url).get_paginator("list_objects_v2")
    pages = pages.paginate(Bucket="numbers", PaginationConfig={"PageSize": 2}, **what)
    found = [entry for page in pages for entry in page.get("Contents", [])]
    return [(entry["Key"], entry["Size"], entry["ETag"].strip('"')) for entry in found]


def test_a_repository_is_what_the_hubs_library_reads(the_hub, start):
    node = start()
    of_library = HfFileSystem(endpoint=the_hub.url, token=False)
    root = "datasets/some-lab/numbers"
    files = of_library.find(root, detail=True)
    api = HfApi(endpoint=the_hub.url, token=False)
    tree = {
        e.path: e
        for e in api.list_repo_tree("some-lab/numbers", repo_type="dataset", recursive=True)
    }
    expected = []
    for path, info in files.items():
        key = path.removeprefix(f"{root}/")
        entry = tree[key]
        version = entry.lfs.sha256 if entry.lfs else entry.blob_id
        expected.append((key, info["size"], version))
    assert len(expected) == 10
    assert listed(node) == sorted(expected, key=lambda entry: entry[0].encode())
    assert [key for key, _, _ in listed(node, Prefix="data/train")] == [
        f"data/train-{n:05d}.parquet" for n in range(4)
    ]
    assert listed(node, Prefix="data/nothing") == listed(node, Prefix="no/such/") == []
    client = forebay.Client(node.url)
    for key, size, version in expected:
        data = of_library.cat_file(f"{root}/{key}")
        assert bytes(client.get(f"numbers/{key}")) == data and len(data) == size
        head = client.head(f"numbers/{key}")
        assert (head.size, head.etag.strip('"')) == (size, version)


def test_what_has_not_changed_is_not_sent_again(the_hub, start):
    client = forebay.Client(start(freshness="0s").url)
    for key in ("numbers/README.md", "numbers/data/train-00000.parquet"):
        first = bytes(client.get(key))
        sent, asked = len(the_hub.sent_bytes), len(the_hub.asked)
        assert bytes(client.get(key)) == first
        assert the_hub.sent_bytes[sent:] == [] and len(the_hub.asked) > asked


def test_a_listing_is_of_one_commit(the_hub, start):
    node = start()
    s3 = s3_client(node.url)
    old = [key for key, _, _ in listed(node)]
    page = s3.list_objects_v2(Bucket="numbers", MaxKeys=2)
    first = dict(the_hub.commits[the_hub.branches["main"]])
    the_hub.commit({"a": b"1", "zzz": b"2", **first})
    keys = [entry["Key"] for entry in page["Contents"]]
    while page.get("NextContinuationToken"):
        token = page["NextContinuationToken"]
        page = s3.list_objects_v2(Bucket="numbers", MaxKeys=2, ContinuationToken=token)
        keys += [entry["Key"] for entry in page["Contents"]]
    assert keys == old
    assert [key for key, _, _ in listed(node)] == sorted([*old, "a", "zzz"], key=str.encode)
    # Directories stand for what is in them, and are not read for that.
    before = len(the_hub.asked)
    found = s3.list_objects_v2(Bucket="numbers", Delimiter="/")
    assert [p["Prefix"] for p in found["CommonPrefixes"]] == ["a b/", "data/", "deep/"]
    trees = [line for line in the_hub.asked[before:] if "/tree/" in line]
    assert trees and not any(re.search("/tree/[0-9a-f]+/(data|deep|a%20b)", line) for line in trees)
    found = s3.list_objects_v2(Bucket="numbers", Delimiter="/", Prefix="deep/")
    assert [p["Prefix"] for p in found["CommonPrefixes"]] == ["deep/er/"]
    before = len(the_hub.asked)
    for odd in ("../x/", "a/../../b/", "/", "data//"):
        assert listed(node, Prefix=odd) == []
    assert not any("/tree/" in line for line in the_hub.asked[before:])


def test_a_dataset_of_the_hub_opens_by_rows(the_hub, start):
    node = start()
    ds = forebay.open("numbers/data/*.parquet", url=node.url)
    assert len(ds) == 800 and ds.take([799, 3])[0]["id"] == 799
    # A commit makes another version; the one before stays readable by its name.
    old = the_hub.branches["main"]
    files = dict(the_hub.commits[old])
    files["data/train-00000.parquet"] = parquet(5000, 10)
    the_hub.commit(files)
    again = forebay.open("numbers/data/*.parquet", url=node.url)
    assert len(again) == 610 and again.version != ds.version
    pinned = start(f"numbers=hf://datasets/some-lab/numbers@{old}/data")
    assert len(forebay.open("numbers/*.parquet", url=pinned.url)) == 800


def test_the_parts_of_a_large_file_come_by_one_address(the_hub, start):
    client = forebay.Client(start().url)
    for begin in range(0, 30 << 20, 1 << 20):
        client.get("numbers/large.bin", start=begin, length=10)
    asked = [line for line in the_hub.asked if "large.bin" in line]
    elsewhere = [line for line in the_hub.asked_elsewhere if line.startswith("GET")]
    assert 1 <= len(asked) <= 2 < len(elsewhere), (asked, elsewhere)


def test_a_limit_of_requests_is_waited_for(the_hub, start):
    client = forebay.Client(start().url)
    the_hub.too_many = 1
    began = time.monotonic()
    assert bytes(client.get("numbers/README.md")) == b"# Some numbers\n"
    assert time.monotonic() - began >= 1 and the_hub.too_many == 0


def test_addresses_that_expire_are_asked_for_again(the_hub, start):
    node = start()
    # Long enough to be used, on a busy machine too.
    the_hub.valid_seconds = 3
    data = the_hub.commits[the_hub.branches["main"]]["large.bin"]
    client = forebay.Client(node.url)
    assert bytes(client.get("numbers/large.bin", length=1000)) == data[:1000]
    time.sleep(3.1)
    begin = 25 << 20
    part = client.get("numbers/large.bin", start=begin, length=9)
    assert bytes(part) == data[begin : begin + 9]
    assert bytes(client.get("numbers/large.bin")) == data
    assert the_hub.expired >= 1


def test_tokens_go_to_the_hub_alone(the_hub, start, tmp_path):
    the_hub.token = "hf_of_a_test"
    with pytest.raises(forebay.Error) as caught:
        forebay.Client(start().url).get("numbers/large.bin")
    assert "Invalid username or password" in str(caught.value) and "HF_TOKEN" in str(caught.value)
    kept = tmp_path / "home"
    kept.mkdir()
    (kept / "token").write_text("hf_of_a_test\n")
    for env in ({"HF_TOKEN": the_hub.token}, {"HF_HOME": str(kept)}):
        client = forebay.Client(start(env=env).url)
        assert len(client.get("numbers/large.bin")) == 30 << 20
    assert "range" in the_hub.sent_elsewhere and "authorization" not in the_hub.sent_elsewhere
    client = forebay.Client(start(env={"HF_TOKEN": the_hub.token}, anonymous="true").url)
    with pytest.raises(forebay.Error, match="Invalid username or password"):
        client.get("numbers/empty")


def test_what_is_wrong_at_the_hub_is_said(the_hub, start):
    the_hub.renamed_from = "some-lab/digits"
    node = start("numbers=hf://datasets/some-lab/digits")
    assert bytes(forebay.Client(node.url).get("numbers/README.md")) == b"# Some numbers\n"
    assert len(listed(node)) == 10
    client = forebay.Client(start("numbers=hf://datasets/some-lab/other").url)
    with pytest.raises(forebay.NotFound, match="Invalid username or password") as caught:
        client.get("numbers/x")
    assert "check the repository's name" in str(caught.value)
    client = forebay.Client(start("numbers=hf://datasets/some-lab/numbers@v9").url)
    with pytest.raises(forebay.NotFound, match="Invalid rev id: v9"):
        client.get("numbers/x")
    client = forebay.Client(start().url)
    with pytest.raises(forebay.NotFound):
        client.get("numbers/data/none.parquet")
    with pytest.raises(forebay.Unsupported, match="read-only"):
        client.put("numbers/x", b"x")
