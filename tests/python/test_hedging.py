"""Hedged reads through a node, from an origin whose first byte has a long tail."""

from __future__ import annotations

import forebay
import pytest
from clusters import eventually
from servers import REGION, Node, Process, forebay_program

NAMES = [f"img/{i:04}.bin" for i in range(200)]


@pytest.fixture
def far(origin, tmp_path):
    """The origin behind a proxy: 5 ms to the first byte in the median, a hundred in one of a
    hundred.
    """
    command = [
        forebay_program(),
        "distance",
        "--to",
        f"127.0.0.1:{origin.port}",
        "--rtt",
        "0ms",
        "--first-byte",
        "5ms",
    ]
    proxy = Process(
        "distance", [*command, "--first-byte-sigma", "1.3", "--seed", "3"], {}, tmp_path
    )
    proxy.wait_until(lambda: proxy.lines, "listening")
    yield "http://" + proxy.lines[0].split()[1]
    proxy.stop()


@pytest.mark.parametrize("percent", [0, 10])
def test_slow_gets_are_sent_again_within_their_share(far, objects, tmp_path, percent):
    node = Node(
        far,
        [],
        tmp_path,
        options=["--origin", f"s3://train?endpoint={far}&region={REGION}&hedge_percent={percent}"],
    )
    try:
        client = forebay.Client(node.url)
        for first in range(0, len(NAMES), 20):
            for item in client.batch(NAMES[first : first + 20], bucket="train"):
                assert bytes(item) == objects[item.objname]
        metrics = node.metrics()
        told = {
            what: metrics[f'forebay_origin_{what}_total{{origin="train"}}']
            for what in ("hedges", "hedges_won")
        }
        gets = metrics['forebay_origin_requests_total{origin="train",op="get"}']
        if percent == 0:
            assert told == {"hedges": 0, "hedges_won": 0} and gets == len(NAMES)
        else:
            assert (
                1 <= told["hedges"] <= 0.1 * len(NAMES)
                and told["hedges_won"] <= told["hedges"]
                and gets == len(NAMES) + told["hedges"]
            )
        # The slower ones are let go of.
        eventually(
            lambda: node.metrics()['forebay_origin_requests_in_flight{origin="train"}'] == 0,
            "nothing is asked any more",
        )
    finally:
        node.stop()
