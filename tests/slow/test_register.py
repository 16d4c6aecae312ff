"""Reads after writes while nodes of a cluster join, leave, stop, die, and lose etcd.

FOREBAY_TEST_REGISTER_SECONDS says for how long each of these happens (60).
"""

from __future__ import annotations

import os
import random
import signal
import time

import boto3
import pytest
from botocore.config import Config
from clusters import Cluster
from load import seed
from register import OPTIONS, SCENARIOS, Checker, trusted
from servers import ACCESS_KEY, REGION, SECRET_KEY, Etcd, Versitygw


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_no_read_gets_less_than_was_acknowledged_before(scenario, tmp_path):
    seconds = float(os.environ.get("FOREBAY_TEST_REGISTER_SECONDS", "60"))
    origin, etcd = Versitygw(tmp_path / "s3"), Etcd(tmp_path / "etcd")
    s3 = boto3.client(
        "s3",
        endpoint_url=origin.url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name=REGION,
        config=Config(s3={"addressing_style": "path"}),
    )
    s3.create_bucket(Bucket="written", CreateBucketConfiguration={"LocationConstraint": REGION})
    source = f"etcd://127.0.0.1:{etcd.port}/training"
    cluster = Cluster(origin, tmp_path, source, *OPTIONS, bucket="written")
    cluster.options[1] = "10m"
    try:
        for name in "abc":
            cluster.start(name)
        cluster.agree(3)
        trusted(cluster)
        made = seed()
        rng = random.Random(made)
        with Checker(cluster, made).running() as checker:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                scenario(checker, etcd, s3, rng)
        print(scenario.__name__, made, checker.reads, checker.writes, checker.failed)
        trusted(cluster)
    finally:
        for node in cluster.nodes.values():
            node.process.send_signal(signal.SIGCONT)
        cluster.close()
        etcd.process.send_signal(signal.SIGCONT)
        etcd.stop(signal.SIGKILL)
        origin.stop(signal.SIGKILL)
