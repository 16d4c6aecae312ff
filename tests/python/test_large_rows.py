"""Rows that are large beside what one answer may hold, and tables with many columns: whoever reads
a dataset from end to end asks for as many rows as fit, and knows how large they are.
"""

from __future__ import annotations

import tarfile

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forebay._fetch import in_pieces
from forebay._paced import FIRST_ROWS, GROWTH, REQUEST_BYTES, Pace, paced, spread
from servers import Node
from test_show import show

ROWS, SIZE = 40, 1_500_000
WIDE_COLUMNS, WIDE_ROWS = 300, 3000


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The bucket's: objects that are large, a wide table, and one with texts and lists."""
    root = tmp_path_factory.mktemp("large")
    (root / "bk" / "objects").mkdir(parents=True)
    for i in range(ROWS):
        (root / "bk" / "objects" / f"{i:03}.bin").write_bytes(bytes([i]) * SIZE)
    (root / "bk" / "wide").mkdir()
    columns = {f"f{i}": np.arange(WIDE_ROWS) + i * 0.5 for i in range(WIDE_COLUMNS)}
    pq.write_table(pa.table(columns), root / "bk" / "wide" / "0.parquet")
    texts = {"a": ["x" * i for i in range(50)], "b": [[i] * i for i in range(50)]}
    (root / "bk" / "texts").mkdir()
    pq.write_table(pa.table(texts), root / "bk" / "texts" / "0.parquet")
    return root / "bk"


@pytest.fixture(scope="module")
def large(files):
    """A node whose answers are small."""
    options = ["--origin", f"file://{files}", "--set", "memory.budget=64MiB"]
    node = Node("", [], files.parent / "node", options=options)
    yield node
    node.stop()


@pytest.fixture
def ds(large):
    ds = forebay.open("bk/objects/", url=large.url)
    assert len(ds) == ROWS
    # One answer holds no such batch.
    with pytest.raises(forebay.TooLarge):
        next(iter(ds.loader(batch_size=ROWS)))
    return ds


def first_bytes(rows) -> list[int]:
    return [bytes(row["data"][:1])[0] for row in rows]


def test_large_rows_are_read_from_end_to_end(ds):
    expected = list(range(ROWS))
    assert first_bytes(ds) == first_bytes(ds.take(range(ROWS))) == expected
    both = forebay.concatenate([ds, ds.select(range(9, -1, -1))])
    assert first_bytes(both) == [*expected, *range(9, -1, -1)]
    odd = ds.filter(lambda row: row["data"][0] % 2 == 1, name="odd of large rows")
    assert first_bytes(odd) == expected[1::2]


def test_large_rows_are_described_and_shown(ds, large):
    summary = ds.describe()
    # As much as it says, and in requests that a node answers.
    assert FIRST_ROWS <= summary.seen <= ROWS
    assert summary.columns["data"].lengths == (SIZE, SIZE, SIZE)
    done = show(large, "bk/objects/", "--rows", str(ROWS), "--sample", str(ROWS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1,500,000 bytes") == ROWS


def test_large_rows_are_written_and_copied(ds, large, files):
    written = ds.write("bk/tars/", format="tar", shard_rows=16)
    assert (written.rows, written.shards) == (ROWS, 3)
    seen = []
    for path in sorted((files / "tars").glob("*.tar")):
        with tarfile.open(path) as tar:
            seen += [tar.extractfile(m).read(1)[0] for m in tar if m.size == SIZE]
    assert seen == list(range(ROWS))
    examples = list(ds.select_columns(["data"]).to_hf_iterable())
    assert [example["data"][0] for example in examples] == list(range(ROWS))


def test_what_was_received_counts_once(large, files):
    ds = forebay.open("bk/wide/", url=large.url)
    rows = ds.take(range(64))
    assert rows.nbytes == pytest.approx(rows.arrow().nbytes, rel=0.02)
    some = forebay.open("bk/texts/", url=large.url).take(range(50))
    assert some.nbytes == pytest.approx(some.arrow().nbytes, rel=0.2)
    ds.write("bk/again/", format="parquet")
    (path,) = (files / "again").glob("*.parquet")
    assert pq.ParquetFile(path).num_row_groups == 1
    loader = ds.loader(batch_size=500)
    for _ in loader:
        pass
    assert loader.stats().bytes == pytest.approx(WIDE_ROWS * WIDE_COLUMNS * 8, rel=0.02)
    assert ds.describe().seen == 1000


def test_where_few_rows_fit_what_fitted_is_remembered():
    asked = []

    def ask(rows, sources):
        asked.append(len(rows))
        if len(rows) > 10:
            raise forebay.TooLarge("as asked")
        return rows

    rows = np.arange(4096)
    found = list(in_pieces(ask, rows, rows))
    assert np.concatenate(found).tolist() == rows.tolist()
    assert len(asked) <= 9 + 4096 / 8
    assert [len(p) for p in in_pieces(ask, rows[:0], None)] == [0]
    with pytest.raises(forebay.TooLarge):
        list(in_pieces(ask, rows[:64], None, least=64))


class Sized:
    """Rows of which only number and size are known."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes

    def __len__(self) -> int:
        return self.count


def test_requests_grow_to_what_fits():
    pace = Pace(256)
    asked = []

    def take(ids):
        asked.append(len(ids))
        return Sized(len(ids), 1000 * len(ids))

    assert sum(map(len, paced(np.arange(1000), pace, take))) == 1000
    growing = [FIRST_ROWS * GROWTH**i for i in range(4)]
    assert asked[:4] == [min(256, n) for n in growing] and max(asked) == 256
    pace.came(Sized(2, 2 * REQUEST_BYTES))
    assert pace.rows == 1
    pace.came(Sized(1, 0))
    assert pace.rows == GROWTH
    assert Pace(2).rows == 2


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 1000])
def test_any_beginning_is_spread(count):
    ids = np.arange(count) * 3
    found = spread(ids)
    assert sorted(found) == ids.tolist()
    for some in (4, 16, 64):
        if count >= 4 * some:
            gaps = np.diff(np.sort(found[:some]))
            assert gaps.max() <= 2 * 3 * count / some
