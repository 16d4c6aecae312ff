"""Datasets in a cluster: one node opens them for all, with real nodes over a real S3 server, whose
requests the nodes count.
"""

from __future__ import annotations

import io
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import forebay
import pyarrow.parquet as pq
import pytest
import requests
import tables
from clusters import Cluster, metric
from conftest import s3_client
from servers import REGION, Node

BUCKET = "tables"
FILES, ROWS = 24, 40


@pytest.fixture(scope="module")
def bucket(origin):
    s3 = s3_client(origin.url)
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    for number in range(FILES):
        put(s3, f"a/{number:02}", number * ROWS)
    return s3


def put(s3, name: str, base: int) -> None:
    out = io.BytesIO()
    pq.write_table(tables.table(ROWS, base), out, row_group_size=10)
    s3.put_object(Bucket=BUCKET, Key=f"{name}.parquet", Body=out.getvalue())


@pytest.fixture
def cluster(origin, bucket, etcd, tmp_path):
    source = f"etcd://127.0.0.1:{etcd.port}/datasets"
    made = Cluster(origin, tmp_path, source, bucket=BUCKET)
    made.options[1] = "1h"
    yield made
    made.close()


def start(cluster: Cluster) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(cluster.start, "abc"))
    cluster.agree(3)


def opened(node: Node, *sources: str, token: str = "") -> requests.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    spec = {"sources": list(sources)}
    return requests.post(f"{node.url}/v1/datasets", json=spec, headers=headers, timeout=60)


def at_all(cluster: Cluster, *sources: str) -> list[dict]:
    """Opened at all nodes at once."""
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda node: opened(node, *sources), cluster.nodes.values()))
    assert [a.status_code for a in answers] == [200] * len(answers), [a.text for a in answers]
    return [a.json() for a in answers]


def listings(cluster: Cluster) -> float:
    """Pages of listings that the bucket was asked for."""
    samples = [item for node in cluster.nodes.values() for item in node.metrics().items()]
    requests_of = (v for k, v in samples if k.startswith("forebay_origin_requests_total"))
    of_lists = (v for k, v in samples if "requests_total" in k and 'op="list"' in k)
    assert sum(requests_of) > 0
    return sum(of_lists)


def homes(cluster: Cluster) -> dict[str, float]:
    """How many datasets each node got from another one."""
    name = "forebay_datasets_opened_at_home_total"
    return {n: metric(node, name) for n, node in cluster.nodes.items()}


def indexed(cluster: Cluster) -> float:
    return sum(
        v
        for node in cluster.nodes.values()
        for k, v in node.metrics().items()
        if k.startswith("forebay_datasets_files_total") and 'how="indexed"' in k
    )


def test_a_dataset_is_listed_and_indexed_once_for_all_nodes(cluster, bucket):
    start(cluster)
    before = listings(cluster)
    described = at_all(cluster, f"{BUCKET}/a/*.parquet")
    assert len({d["id"] for d in described}) == 1
    assert {d["rows"] for d in described} == {FILES * ROWS}
    assert listings(cluster) - before == 1
    assert indexed(cluster) == FILES
    assert sorted(homes(cluster).values()) == [0, 1, 1]
    # All rows, wherever they are asked for.
    for node in cluster.nodes.values():
        ds = forebay.open(f"{BUCKET}/a/*.parquet", url=node.url)
        assert [row["id"] for row in ds[[0, 399, 959]]] == [0, 399, 959]

    # What has changed is seen at all nodes, and only that is read.
    put(bucket, "a/05", 10_000)
    before, known = indexed(cluster), described[0]["id"]
    again = at_all(cluster, f"{BUCKET}/a/*.parquet")
    assert len({d["id"] for d in again} | {known}) == 2
    # A node that had opened it for another one by then knows the new version already.
    assert {known} <= {d["previous"] for d in again} <= {known, None}
    assert indexed(cluster) - before == 1
    for node in cluster.nodes.values():
        ds = forebay.open(f"{BUCKET}/a/*.parquet", url=node.url)
        assert ds[5 * ROWS]["id"] == 10_000
    put(bucket, "a/05", 5 * ROWS)


def test_without_its_home_a_node_opens_a_dataset_itself(cluster, bucket):
    start(cluster)
    for gone in "ab":
        each = [f"{BUCKET}/a/{number:02}.parquet" for number in range(FILES)]
        of_gone = next(source for source in each if homed_at(cluster, source, gone))
        cluster.stop(gone, signal.SIGKILL)
        for source in (of_gone, f"{BUCKET}/a/", f"{BUCKET}/a/0*.parquet"):
            assert len({d["id"] for d in at_all(cluster, source)}) == 1


def homed_at(cluster: Cluster, source: str, name: str) -> bool:
    """Whether this node opens this for the others."""
    before = homes(cluster)
    at_all(cluster, source)
    after = homes(cluster)
    return after[name] == before[name]


KEYS = """
[[keys]]
access_key = "all"
secret_key = "everything-and-more"
token = "of-all"

[[keys]]
access_key = "some"
secret_key = "less-than-everything"
token = "of-some"
[[keys.allow]]
bucket = "tables"
actions = ["read", "list"]
prefix = "a/1"
"""


def test_what_a_key_may_open_does_not_depend_on_who_has_opened_it(cluster, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    cluster.options += ["--set", f"auth.keys_file={keys}", "--set", "auth.unix_trusted=false"]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(cluster.start, "abc"))
    everything, some = f"{BUCKET}/a/*.parquet", f"{BUCKET}/a/1*.parquet"
    ids = set()
    for node in cluster.nodes.values():
        # Before somebody else has opened it, and after.
        for _ in range(2):
            assert opened(node, everything, token="of-some").status_code == 403
            answer = opened(node, everything, token="of-all")
            assert answer.status_code == 200, answer.text
        answer = opened(node, some, token="of-some")
        assert (answer.status_code, answer.json()["files"]) == (200, 10)
        ids.add(answer.json()["id"])
        assert opened(node, some).status_code in (401, 403)
    assert len(ids) == 1


def steps_sent(cluster: Cluster) -> dict[str, float]:
    return {n: metric(node, "forebay_streams_steps_total") for n, node in cluster.nodes.items()}


def test_each_node_sends_its_part_of_one_plan_to_each_rank_and_one_may_die(cluster, bucket):
    start(cluster)
    urls = {name: node.url for name, node in cluster.nodes.items()}

    def rank(number: int, spreads: bool, dies: bool) -> list[list[int]]:
        first, *others = (urls[n] for n in ("abc", "bca")[number])
        # By itself, only a client without a node on its machine asks several.
        client = forebay.Client(first, direct=spreads)
        ds = forebay.open(f"{BUCKET}/a/*.parquet", client=client)
        loader = ds.loader(
            batch_size=8,
            shuffle=forebay.Block(4),
            seed=3,
            epochs=2,
            rank=number,
            world_size=2,
            stream=True,
            nodes=None if spreads else others,
            connections=6,
            window_bytes=200_000,
        )
        steps = []
        for batch in loader:
            steps.append([row["id"] for row in batch])
            if dies and number == 0 and len(steps) == 20:
                cluster.stop("c", signal.SIGKILL)
        return steps

    def both(*, spreads: bool, dies: bool = False) -> list[list[list[int]]]:
        before = steps_sent(cluster)
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(rank, (0, 1), (spreads, spreads), (dies, dies)))
        after = steps_sent(cluster)
        sent = [after[name] - before[name] for name in after]
        assert min(sent) >= sum(sent) / 5, sent
        return found

    before = cluster.from_bucket()
    whole = both(spreads=False)
    rows = [row for steps in whole for step in steps for row in step]
    # Two epochs, in which each row comes once.
    assert sorted(rows) == sorted(list(range(FILES * ROWS)) * 2)
    # However many nodes send it, the bucket has sent each byte once, besides footers.
    nodes = cluster.nodes.values()
    footers = sum(metric(node, "forebay_datasets_indexed_bytes_total") for node in nodes)
    stored = sum(o["Size"] for o in bucket.list_objects_v2(Bucket=BUCKET)["Contents"])
    assert cluster.from_bucket() - before - footers <= 1.01 * stored
    assert both(spreads=True) == whole
    assert both(spreads=True, dies=True) == whole


def test_a_report_tells_what_came_from_other_nodes(cluster, bucket):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cluster.start, "ab"))
    cluster.agree(2)
    stored = sum(o["Size"] for o in bucket.list_objects_v2(Bucket=BUCKET)["Contents"])
    for name, node in cluster.nodes.items():
        client = forebay.Client(node.url, direct=False)
        ds = forebay.open(f"{BUCKET}/a/*.parquet", client=client)
        # Each row once. Whoever fetches it, for the loop or ahead of it: what another node owns is
        # sent by that one, and no node owns everything.
        loader = ds.loader(batch_size=10, job=f"at-{name}", follow=False, prefetch=0)
        assert [row["id"] for batch in loader for row in batch] == list(range(FILES * ROWS))
        report = loader.report(order=False)
        run = report.json()["run"]
        of = run["sources"]
        assert 0 < of["peer"] < stored, of
        assert of["memory"] == 0 and of["peer"] + of["disk"] + of["origin"] >= 0.9 * stored, of
        assert run["hit_ratio"] == pytest.approx(1 - of["origin"] / sum(of.values()))
        assert report.json()["epochs"][0]["sources"] == of
        # The node's account of the job says the same, and every form of the report shows it.
        said = json.loads(client.job(f"at-{name}"))
        assert {source: said[f"{source}_bytes"] for source in of} == of
        assert re.search(r"bytes from +memory 0 B, disk .*, peer [1-9]", str(report)), str(report)
        assert "peer" in report.html()
        # What another node sent may just have been read at the origin: it is not counted as saved.
        saved = report.json()["origin"]["bytes_saved"]
        assert saved == max(0, of["disk"] - of["origin"])
