"""The servers of a test run, and clients of them. One origin and one node serve all tests; tests
that break things start their own.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# PyTorch's workers use it: a forked process must not be the first to import it, because another
# thread may have been importing when it was forked.
import numpy.random  # noqa: F401
import pytest

sys.path.insert(0, str(Path(__file__).parent))
# namespaces.py, which the demo has too.
sys.path.append(str(Path(__file__).parents[2] / "tools"))

import dataset
from servers import ACCESS_KEY, CACHE, REGION, SECRET_KEY, Etcd, Node, Versitygw, s3_client

# A shell starts background programs with Ctrl-C ignored, and the programs that the tests start
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# This machine's settings must not reach the tests.
for name in list(os.environ):
    if (
        name.startswith(("AWS_", "FOREBAY_"))
        and name not in ("FOREBAY_CACHE", "FOREBAY_BIN", "FOREBAY_RECORD")
        and not name.startswith("FOREBAY_TEST_")
    ):
        del os.environ[name]
os.environ.update(
    AWS_ACCESS_KEY_ID=ACCESS_KEY,
    AWS_SECRET_ACCESS_KEY=SECRET_KEY,
    AWS_REGION=REGION,
    AWS_DEFAULT_REGION=REGION,
    AWS_EC2_METADATA_DISABLED="true",
    # Where the servers of the tests are installed, which XDG_CACHE_HOME would say too.
    FOREBAY_CACHE=str(CACHE),
)


def pytest_configure():
    """What the package and other libraries keep for the next process (filters, indexes of keys,
    copies) is kept for this run only. Libraries look at this when they are imported, so it is set
    before any test is.
    """
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="forebay-tests-cache-")


def pytest_unconfigure():
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture
def etcd(tmp_path):
    """An etcd of one test."""
    server = Etcd(tmp_path / "etcd")
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def no_loader_is_left(request):
    """PyTorch's iterator waits up to five seconds for each of its workers when it is collected
    after an error: now, not amid what a later test measures.
    """
    yield
    if hasattr(request.module, "DataLoader"):
        gc.collect()


@pytest.fixture(scope="session")
def origin(tmp_path_factory):
    """An S3 server with the buckets `train`, `other` (of dataset.py) and `scratch` (empty, to write
    to).
    """
    server = Versitygw(tmp_path_factory.mktemp("versitygw"))
    s3 = s3_client(server.url)
    for bucket in ("train", "other", "scratch"):
        s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
    wanted = [("train", k, v) for k, v in dataset.objects().items()] + [
        ("other", k, v) for k, v in dataset.other().items()
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda o: s3.put_object(Bucket=o[0], Key=o[1], Body=o[2]), wanted))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def node(origin, tmp_path_factory):
    node = Node(origin.url, ["train", "other", "scratch"], tmp_path_factory.mktemp("node"))
    yield node
    node.stop()


@pytest.fixture(scope="session")
def tables(tmp_path_factory):
    """A node over a directory with the bucket `tables`: Parquet files of tables.py."""
    import tables

    root = tmp_path_factory.mktemp("tables")
    tables.write(root / "tables")
    server = Node("", [], root / "node", options=["--origin", f"file://{root / 'tables'}"])
    yield server
    server.stop()


@pytest.fixture(scope="session")
def objects() -> dict[str, bytes]:
    return dataset.objects()


@pytest.fixture(scope="session")
def client(node):
    import forebay

    return forebay.Client(node.url)


@pytest.fixture(scope="session")
def s3(node):
    """boto3 against the node."""
    return s3_client(node.url)


@pytest.fixture(scope="session")
def origin_s3(origin):
    """boto3 against the origin itself."""
    return s3_client(origin.url)


@pytest.fixture
def scratch(request):
    """A prefix in the bucket `scratch` that no other test uses."""
    return re.sub(r"[^\w.]+", "-", request.node.nodeid.removesuffix("]"))
