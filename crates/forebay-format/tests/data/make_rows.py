"""Writes data/rows: files of 1000 rows by pyarrow. Row i has n = i; text is null where 7 divides i.
Run with a Python that has pyarrow.
"""

import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

here = pathlib.Path(__file__).parent / "rows"
here.mkdir(exist_ok=True)
n = list(range(1000))
table = pa.table(
    {
        "n": pa.array(n, pa.int64()),
        "text": [None if i % 7 == 0 else f"text of {i}" for i in n],
        "floats": [[i / 2] * (i % 4) for i in n],
        "nested": [{"a": i, "b": [{"c": str(i % 10)}] * (i % 3)} for i in n],
    }
)
for codec in ["none", "snappy", "gzip", "zstd", "lz4", "brotli"]:
    extra = {
        "write_page_index": codec in ("zstd", "none"),
        "data_page_version": "2.0" if codec in ("zstd", "gzip") else "1.0",
    }
    pq.write_table(
        table,
        here / f"{codec}.parquet",
        compression=codec,
        row_group_size=300,
        data_page_size=1024,
        **extra,
    )
pq.write_table(table.slice(0, 0), here / "empty.parquet")
kinds = pa.array([f"kind {i // 100}" for i in n]).dictionary_encode()
pq.write_table(pa.table({"n": n, "text": kinds}), here / "dictionary.parquet", row_group_size=250)
for codec in [None, "lz4", "zstd"]:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_file(
        str(here / f"{codec or 'plain'}.arrow"), table.schema, options=options
    ) as w:
        w.write_table(table, max_chunksize=300)
    with pa.ipc.new_stream(
        str(here / f"{codec or 'plain'}.arrows"), table.schema, options=options
    ) as w:
        w.write_table(table, max_chunksize=300)
batches = [
    pa.record_batch(
        {"n": n[i : i + 200], "text": kinds.slice(i, 200).dictionary_decode().dictionary_encode()}
    )
    for i in range(0, 1000, 200)
]
with pa.ipc.new_stream(str(here / "replaced-dictionary.arrows"), batches[0].schema) as w:
    for b in batches:
        w.write_batch(b)
with pa.ipc.new_stream(
    str(here / "delta-dictionary.arrows"),
    batches[0].schema,
    options=pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True),
) as w:
    for i in range(0, 1000, 200):
        part = pa.DictionaryArray.from_arrays(
            kinds.indices.slice(i, 200), kinds.dictionary.slice(0, i // 100 + 2)
        )
        w.write_batch(pa.record_batch({"n": n[i : i + 200], "text": part}))
with pa.ipc.new_file(
    str(here / "dictionary.arrow"), pa.schema({"n": pa.int64(), "text": kinds.type})
) as w:
    w.write_table(pa.table({"n": n, "text": kinds}), max_chunksize=300)
with pa.ipc.new_file(str(here / "empty.arrow"), table.schema):
    pass
