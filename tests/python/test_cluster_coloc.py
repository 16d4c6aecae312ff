"""Batches with `coloc`, which a node of a cluster sends to the node that owns most of them: the
published `aistore` client, real nodes, a real S3 server.
"""

from __future__ import annotations

import json
import random
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from aistore.sdk import Client
from aistore.sdk.enums import Colocation
from clusters import Cluster, eventually, fetch, metric, received
from conftest import s3_client
from servers import REGION

BUCKET = "placed"


@pytest.fixture(scope="module")
def bucket(origin) -> dict[str, bytes]:
    s3 = s3_client(origin.url)
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    made = random.Random(6)
    objects = {f"o{i:03}": made.randbytes(made.randrange(1, 40_000)) for i in range(150)}
    for key, value in objects.items():
        s3.put_object(Bucket=BUCKET, Key=key, Body=value)
    return objects


@pytest.fixture
def cluster(origin, etcd, tmp_path):
    made = Cluster(origin, tmp_path, f"etcd://127.0.0.1:{etcd.port}/placed", bucket=BUCKET)
    yield made
    made.close()


def start(cluster: Cluster) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(cluster.start, "abc"))
    cluster.agree(3)


def owned(cluster: Cluster, bucket: dict[str, bytes]) -> dict[str, list[str]]:
    """The objects that each node owns: those that it reads from the bucket when another one is
    asked for them."""
    found: dict[str, list[str]] = {name: [] for name in cluster.nodes}
    for key in bucket:
        before = from_bucket(cluster)
        fetch(f"{cluster.nodes['a'].url}/{BUCKET}/{key}")
        after = from_bucket(cluster)
        (owner,) = [name for name in after if after[name] > before[name]]
        found[owner].append(key)
    assert min(map(len, found.values())) > 20
    return found


def from_bucket(cluster: Cluster) -> dict[str, float]:
    return {name: received(node) for name, node in sorted(cluster.nodes.items())}


def counted(cluster: Cluster, name: str) -> list[float]:
    return [metric(cluster.nodes[node], name) for node in sorted(cluster.nodes)]


def redirected(cluster: Cluster) -> list[float]:
    return counted(cluster, "forebay_getbatch_redirected_total")


def answered(cluster: Cluster) -> list[float]:
    return counted(cluster, "forebay_getbatch_n_total")


def added(counts, cluster: Cluster, work) -> list[float]:
    before = counts(cluster)
    work()
    return [a - b for a, b in zip(counts(cluster), before, strict=True)]


class Unfollowed(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


def location(url: str, keys: list[str], query: str = "?coloc=1", token: str = "") -> str | None:
    """Where a batch is sent to."""
    body = json.dumps({"in": [{"objname": key} for key in keys], "strm": True, "coer": True})
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{url}/v1/ml/moss/{BUCKET}{query}", body.encode(), headers)
    try:
        with urllib.request.build_opener(Unfollowed).open(request, timeout=30) as answer:
            answer.read()
            return None
    except urllib.error.HTTPError as e:
        assert e.code == 307, e.read()
        return e.headers["Location"]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_colocated_batch_is_answered_by_who_owns_most_of_it(cluster, bucket, streaming):
    start(cluster)
    of = owned(cluster, bucket)
    ais = Client(cluster.nodes["a"].url)
    mostly_b = of["b"][:12] + of["c"][:4] + of["a"][:4]
    random.Random(1).shuffle(mostly_b)

    def read(keys, colocation):
        batch = ais.batch(
            keys,
            bucket=ais.bucket(BUCKET, provider="s3"),
            colocation=colocation,
            streaming_get=streaming,
        )
        assert [data for _, data in batch.get()] == [bucket[key] for key in keys]

    aware, none = Colocation.TARGET_AWARE, Colocation.NONE
    assert added(answered, cluster, lambda: read(mostly_b, aware)) == [0, 1, 0]
    assert added(redirected, cluster, lambda: read(mostly_b, aware)) == [1, 0, 0]
    assert added(answered, cluster, lambda: read(mostly_b, none)) == [1, 0, 0]
    # No node has most of these, or it is the one that was asked.
    even = of["a"][:5] + of["b"][:6] + of["c"][:5]
    assert added(answered, cluster, lambda: read(even, aware)) == [1, 0, 0]
    assert added(answered, cluster, lambda: read(of["a"][:9], aware)) == [1, 0, 0]
    # It is not sent where nobody answers.
    cluster.stop("b", signal.SIGKILL)
    read(mostly_b, none)
    eventually(lambda: location(cluster.nodes["a"].url, mostly_b) is None, "answered here")


def test_a_batch_is_sent_on_once_and_not_with_a_key(cluster, bucket):
    start(cluster)
    of = owned(cluster, bucket)
    url, keys = cluster.nodes["a"].url, of["b"][:9]
    to = location(url, keys, "?provider=s3&coloc=2&x=%26%C3%BC")
    assert to.startswith(f"{cluster.nodes['b'].url}/v1/ml/moss/{BUCKET}?pid=")
    assert to.endswith("&provider=s3&coloc=2&x=%26%C3%BC")
    # Whoever gets it answers, even if another node owned all of it.
    assert location(url, keys, "?coloc=1&pid=0123") is None
    assert location(cluster.nodes["b"].url, keys) is None
    assert location(url, keys, "?coloc=0") is None and location(url, keys, "") is None
    # HTTP clients do not show their key to the host that they are sent to.
    assert location(url, keys, token="any-token") is None
