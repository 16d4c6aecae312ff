"""The engine inside the Python process: a client without a URL."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import forebay
import pytest
from forebay.torch import MapDataset
from servers import REGION
from test_processes import in_fork
from torch.utils.data import DataLoader

NAMES = [f"img/{i:04}.bin" for i in range(100)]


@pytest.fixture
def where(origin, tmp_path):
    return {
        "origin": f"s3://train?endpoint={origin.url}&region={REGION}",
        "cache": f"{tmp_path}/cache:1GiB",
    }


def read(where, names) -> list[bytes]:
    return [bytes(item) for item in forebay.Client(**where).batch(names, bucket="train")]


def read_and_report(client, names, out) -> None:
    out.put([bytes(item) for item in client.batch(names, bucket="train")])


def test_reading_and_writing(origin, origin_s3, objects, tmp_path, scratch):
    urls = [
        f"s3://{bucket}?endpoint={origin.url}&region={REGION}" for bucket in ("train", "scratch")
    ]
    client = forebay.open_local(urls, f"{tmp_path}/cache:1GiB")
    assert client.url is None and bytes(client.get("train/one")) == b"1"
    assert [bytes(i) for i in client.batch(NAMES, bucket="train")] == [objects[n] for n in NAMES]
    client.put(f"scratch/{scratch}", b"through")
    assert origin_s3.get_object(Bucket="scratch", Key=scratch)["Body"].read() == b"through"
    assert client.route == f"unix:{tmp_path}/cache/forebay.sock"
    assert [i.key for i in client.list("train/img/000")] == NAMES[:10]
    with pytest.raises(forebay.NotFound):
        client.get("train/nope")


def test_several_clients_share_one_engine(where, objects):
    clients = [forebay.Client(**where) for _ in range(3)]
    for client in clients:
        assert bytes(client.get("train/img/0042.bin")) == objects["img/0042.bin"]


def test_an_engine_answers_for_its_own_origins_only(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    a, b = (f"data=file://{tmp_path / name}" for name in "ab")
    cache = f"{tmp_path}/cache:64MiB"
    assert bytes(forebay.Client(origin=a, cache=cache).get("data/x")) == b"a"
    with pytest.raises(forebay.InvalidRequest):
        forebay.Client(origin=b, cache=cache).get("data/x")
    assert bytes(forebay.Client(origin=a, cache=cache).get("data/x")) == b"a"
    assert bytes(forebay.Client(origin=b, cache=f"{tmp_path}/b:64MiB").get("data/x")) == b"b"


def test_of_two_origins_that_come_at_the_same_moment_one_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    for attempt in range(5):
        cache, both = f"{tmp_path}/cache-{attempt}:64MiB", threading.Barrier(2)

        def first_call(name, cache=cache, both=both):
            client = forebay.Client(origin=f"data=file://{tmp_path / name}", cache=cache)
            both.wait()
            try:
                return bytes(client.get("data/x")).decode()
            except forebay.InvalidRequest:
                return None

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(first_call, "ab")) in (["a", None], [None, "b"])


def test_an_origin_may_be_spelt_in_several_ways(tmp_path):
    where, cache = tmp_path / "data", f"{tmp_path}/cache:64MiB"
    for name in ("aa", "bb"):
        (where / name).mkdir(parents=True)
        (where / name / "x").write_text(name)
    first = forebay.Client(origin=[f"one=file://{where}/aa", f"file://{where}/*"], cache=cache)
    assert bytes(first.get("one/x")) == b"aa"
    for origin in (f"one={where}/aa/", f"one={where}/bb/../aa", f"{where}/*", f"file://{where}/aa"):
        client = forebay.Client(origin=origin, cache=cache)
        assert bytes(client.get("aa/x")) == b"aa", origin
    for origin in (f"one={where}/bb", f"bb={where}/aa", f"{tmp_path}/*"):
        with pytest.raises(forebay.InvalidRequest):
            forebay.Client(origin=origin, cache=cache).get("one/x")


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_other_processes_use_the_first_ones_engine(where, objects, way):
    client = forebay.Client(**where)
    expect = [objects[n] for n in NAMES]
    assert [bytes(i) for i in client.batch(NAMES, bucket="train")] == expect
    context = multiprocessing.get_context(way)
    out = context.Queue()
    children = [
        context.Process(target=read_and_report, args=(client, NAMES, out)) for _ in range(2)
    ]
    for child in children:
        child.start()
    assert [out.get(timeout=60) for _ in children] == [expect, expect]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert [bytes(i) for i in client.batch(NAMES, bucket="train")] == expect


@pytest.mark.parametrize("workers", ["fork", "spawn"])
def test_in_a_dataloader_whose_parent_has_not_used_it(where, objects, workers):
    data = MapDataset(forebay.Client(**where), NAMES, bucket="train", decode=bytes)
    loader = DataLoader(
        data, batch_size=10, num_workers=2, multiprocessing_context=workers, collate_fn=list
    )
    assert [sample for batch in loader for sample in batch] == [objects[n] for n in NAMES]


def test_the_cache_outlives_the_process_and_the_owner_may_change(where, objects):
    script = f"""
        import forebay
        client = forebay.Client(**{where!r})
        print(len(client.get("train/big/8MiB")), client.head("train/big/8MiB").cache)
    """
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"{8 << 20} ")
    # Here the directory is taken over, and given back when a client's process has ended.
    assert bytes(forebay.Client(**where).get("train/big/8MiB")) == objects["big/8MiB"]


def test_a_takeover_when_the_owner_has_ended(where, objects):
    """A client that has talked to another process's engine opens the cache itself when that process
    is gone.
    """
    code = textwrap.dedent(f"""
        import forebay, sys
        client = forebay.Client(**{where!r})
        client.get("train/one")
        print("open", flush=True)
        sys.stdin.read()
    """)
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout.readline() == "open\n"
    client = forebay.Client(**where)
    assert bytes(client.get("train/one")) == b"1"
    owner.communicate("")
    assert owner.returncode == 0
    assert bytes(client.get("train/img/0001.bin")) == objects["img/0001.bin"]


def test_a_child_that_forked_before_the_engine_started(where, objects):
    client = forebay.Client(**where)

    def work():
        assert bytes(client.get("train/one")) == b"1"

    assert in_fork(work) == 0
    assert bytes(client.get("train/one")) == b"1"
    assert in_fork(work) == 0


def test_forks_of_a_process_whose_engines_wait_start_engines_of_their_own(
    origin, objects, tmp_path
):
    """The threads of the parent's engines wait for locks when it forks; the child has none of them,
    and its own wait for each other.
    """
    where = {"origin": f"s3://train?endpoint={origin.url}&region={REGION}"}
    names = [n for n in objects if n.startswith(("big/", "img/"))]
    clients = [forebay.Client(**where, cache=f"{tmp_path}/parent{i}:1GiB") for i in range(12)]
    for client in clients:
        assert bytes(client.get("train/one")) == b"1"

    def work(child):
        mine = forebay.Client(**where, cache=f"{tmp_path}/child{child}:1GiB")
        for client in (mine, clients[child % len(clients)]):
            assert [bytes(i) for i in client.batch(names, bucket="train")] == [
                objects[n] for n in names
            ]

    for child in range(40):
        assert in_fork(lambda child=child: work(child)) == 0


def test_what_cannot_be(tmp_path):
    for options in (
        {"origin": "s3://train"},
        {"cache": f"{tmp_path}:1GiB"},
        {"origin": "s3://train", "cache": str(tmp_path)},
        {"origin": "nonsense://x", "cache": f"{tmp_path}:1GiB"},
    ):
        with pytest.raises(ValueError):
            forebay.Client(**options).get("train/one")
    with pytest.raises(TypeError):
        forebay.Client(origin=1, cache="x:1GiB")
