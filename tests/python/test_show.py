"""`forebay show`: a dataset in a terminal, as JSON, and what is wrong with a request."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import tarfile

import forebay
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forebay.show import main as show_main
from servers import Node, forebay_program

ROWS = 300
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 92
WAV = b"RIFF" + struct.pack("<I", 4) + b"WAVE" + b"\0" * 32


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A node over the bucket `bk`: a table with texts of very different lengths, and a tar of
    pictures and sounds.
    """
    root = tmp_path_factory.mktemp("show")
    (root / "bk" / "table").mkdir(parents=True)
    table = pa.table(
        {
            "n": pa.array(range(ROWS)),
            "x": pa.array([float("nan") if i % 3 == 0 else i / 2 for i in range(ROWS)]),
            "text": pa.array([None if i % 10 == 9 else "a" * (1 << (i % 9)) for i in range(ROWS)]),
            "wild\x1b[31m": pa.array(["\x1b[2Jcleared\nnext"] * ROWS),
        }
    )
    for part in range(2):
        pq.write_table(table[part * 150 :][:150], root / "bk" / "table" / f"{part}.parquet")
    (root / "bk" / "bad").mkdir()
    pq.write_table(table[:10], root / "bk" / "bad" / "0.parquet")
    (root / "bk" / "bad" / "1.parquet").write_bytes(b"PAR1 and nothing of use" * 10)
    with tarfile.open(root / "bk" / "media.tar", "w") as tar:
        for i in range(3):
            for name, data in ((f"{i}.png", PNG), (f"{i}.wav", WAV), (f"{i}.bin", b"\0" * i)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    with tarfile.open(root / "bk" / "samples.tar", "w") as tar:
        for name, data in (
            ("0.cls", b"7\n"),
            ("0.index", b"seven"),
            ("0.txt", "a café <b>".encode()),
            ("0.old.txt", b"\xff"),
            ("0.json", b'{"a": 1}'),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    node = Node("", [], root / "node", options=["--origin", f"file://{root / 'bk'}"])
    yield node
    node.stop()


def show(node: Node, *arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "FOREBAY_NODE": node.url, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "forebay", "show", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_a_table_is_shown(shown):
    # A prefix without its slash.
    done = show(shown, "s3://bk/table", "--rows", "1")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    for line in (
        r"dataset   s3://bk/table/",
        r"version   \w{12,}",
        r"format    parquet",
        r"files     2 \([\d.]+ KiB\)",
        r"rows      300",
        r"columns, by all 300 rows",
        r"  n +Int64 +0 +0 to 299, mean 149\.5",
        r"  x +Float64 +0 +0\.5 to 149\.5, mean [\d.]+, 100 NaN",
        r"  text +\w+ +10\.0% +1 to 256, mean [\d.,]+  [▁-█ ]+",
        r"row 0",
        r"  n +0",
        r"  text +a",
    ):
        assert re.search(rf"^{line}$", text, re.M), (line, text)
    # Nothing in the data controls the terminal.
    assert "\x1b" not in text and r"\x1b[2Jcleared\nnext" in text and r"wild\x1b[31m" in text
    assert "row 1" not in text
    some = show(shown, "bk/table/", "--sample", "10", "--rows", "0").stdout
    assert "columns, by 10 of 300 rows, spread evenly; * of all rows, by statistics\n" in some
    assert re.search(r"^  n +Int64 +0\* +0 to 299\*, mean 135$", some, re.M), some
    assert re.search(r"^  text +\w+ +10\.0%\* ", some, re.M), some
    few = show(shown, "bk/table/", "--column", "n", "--column", "x", "--sample", "0", "--rows", "0")
    assert few.returncode == 0 and few.stdout.endswith("columns\n  n  Int64\n  x  Float64\n")


def test_pictures_and_sounds_are_named_by_kind_and_size(shown):
    done = show(shown, "bk/media.tar", "--rows", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("image/png, 100 bytes\n") == 2
    assert done.stdout.count("audio/wav, 44 bytes\n") == 2
    assert re.search(r"^  bin +1 byte$", done.stdout, re.M)


def test_a_prefix_needs_no_slash_where_it_stands_alone(shown):
    under = forebay.open("bk/table/", url=shown.url)
    for source in ("bk/table", "s3://bk/table", ["bk/table"]):
        ds = forebay.open(source, url=shown.url)
        assert ds.version == under.version and ds.name.endswith("bk/table/")
    assert pickle.loads(pickle.dumps(ds)).version == under.version
    # An object of that name is meant, where there is one.
    assert len(forebay.open("bk/media.tar", url=shown.url).files) == 1
    for source in ("bk/tabl", "bk/table*x", ["bk/table", "bk/media.tar"]):
        with pytest.raises(forebay.NotFound, match="tabl"):
            forebay.open(source, url=shown.url)
    with pytest.raises(forebay.NotFound, match="no object exists: bk/tabl "):
        forebay.open("bk/tabl", url=shown.url)
    with pytest.raises(forebay.NotFound, match="bk/table/"):
        forebay.open_shards("bk/table", url=shown.url)


def test_as_json_it_is_what_the_library_says(shown):
    done = show(shown, "--json", "bk/table/*.parquet", "--rows", "3")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    ds = forebay.open("bk/table/*.parquet", url=shown.url)
    assert (told["version"], told["format"], told["files"]) == (ds.version, "parquet", 2)
    assert (told["rows"], told["seen"], told["left_out"]) == (ROWS, ROWS, [])
    summary = ds.describe()
    assert told["columns"] == json.loads(json.dumps(summary.json()["columns"]))
    lengths = told["columns"]["text"]["lengths"]
    assert (lengths["least"], lengths["most"]) == (1, 256)
    counts = [0] * 9
    for i in range(ROWS):
        counts[i % 9] += i % 10 != 9
    # Nine powers of two in bins of two.
    assert lengths["histogram"] == [
        [1, 3, counts[0] + counts[1]],
        [4, 15, counts[2] + counts[3]],
        [16, 63, counts[4] + counts[5]],
        [64, 255, counts[6] + counts[7]],
        [256, 256, counts[8]],
    ]
    assert [row["n"] for row in told["first"]] == [0, 1, 2]
    assert told["first"][0]["x"] == "nan" and told["first"][1]["x"] == 0.5
    media = json.loads(show(shown, "--json", "bk/media.tar").stdout)
    assert media["first"][0]["png"] == {"kind": "image/png", "bytes": 100}
    left = json.loads(show(shown, "--json", "bk/bad/", "--skip-damaged").stdout)
    assert left["rows"] == 10 and left["left_out"][0]["name"] == "bk/bad/1.parquet"


@pytest.mark.parametrize(
    "sizes, bins",
    [
        ([5] * 3, [(5, 5, 3)]),
        ([0], [(0, 0, 1)]),
        ([0, 4, 4], [(0, 0, 1), (1, 1, 0), (2, 2, 0), (3, 3, 0), (4, 4, 2)]),
        (range(100, 116), [(n, n + 1, 2) for n in range(100, 116, 2)]),
        ([0, 1, 1 << 40], None),
    ],
)
def test_histograms(sizes, bins):
    from collections import Counter

    from forebay._look import BINS, _bars, _histogram

    found = _histogram(Counter(sizes))
    assert bins is None or found == bins
    # All lengths are in one bin, and the bins follow each other.
    assert sum(n for _, _, n in found) == len(sizes) and len(found) <= BINS
    assert found[0][0] == min(sizes) and found[-1][1] == max(sizes)
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(found))
    for low, high, n in found:
        assert n == sum(low <= size <= high for size in sizes)
    assert len(_bars(found)) == len(found) and "█" in _bars(found)


def test_what_is_wrong_is_said(shown):
    for arguments, status, said in [
        (["bk/none"], 1, "error: .*bk/none"),
        (["bk/table/*.csv"], 1, "error: no files match"),
        (["bk/bad/"], 1, r"error: .*1\.parquet"),
        (["bk/table/", "--column", "nothing"], 2, "no column 'nothing'.*\nhint: its columns: n, x"),
        (["bk/table/", "--rows", "-1"], 2, "error: --rows -1\nhint: give a number from 0"),
        (["bk/table/", "--sample", "-1"], 2, "error: --sample -1"),
        (["bk/table/", "--format", "rar"], 2, "error: .*rar"),
        ([], 2, "required: SOURCE"),
    ]:
        failed = show(shown, *arguments)
        assert failed.returncode == status, (arguments, failed.stderr)
        assert re.search(said, failed.stderr) and not failed.stdout, (arguments, failed.stderr)
    failed = show(shown, "--json", "bk/none")
    # As the compiled commands say it.
    for command in (["show", "bk/none"], ["stat", "bk/none"]):
        failed = subprocess.run(
            [forebay_program(), *command, "--json", "--node", shown.url],
            capture_output=True,
            text=True,
            timeout=120,
        )
        error = json.loads(failed.stderr)["error"]
        assert "bk/none" in error["message"] and isinstance(error["causes"], list), command
        assert error["code"] == "not_found", command
        # A bucket that is not served is another thing.
        command[1] = "nowhere/none"
        failed = subprocess.run(
            [forebay_program(), *command, "--json", "--node", shown.url],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert json.loads(failed.stderr)["error"]["code"] == "bucket_not_found", command
    failed = show(shown, "--json", "bk/table/", "--rows", "-1")
    assert json.loads(failed.stderr)["error"]["code"] == "invalid"
    nobody = show(shown, "bk/table/", "--node", "http://127.0.0.1:9")
    assert nobody.returncode == 1 and "cannot connect to http://127.0.0.1:9" in nobody.stderr


def test_the_code_of_an_error_is_that_of_the_node(monkeypatch, capsys):
    said = forebay.NotFound("no bucket", status=404, code="bucket_not_found")
    assert pickle.loads(pickle.dumps(said)).code == "bucket_not_found"

    def refuses(*_, **__):
        raise said

    monkeypatch.setattr(forebay, "open", refuses)
    assert show_main(["b/x/", "--json"]) == 1
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "bucket_not_found"
    # By its class, where only this process has looked.
    said.code = None
    assert show_main(["b/x/", "--json"]) == 1
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "not_found"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_result_that_cannot_be_written_is_an_error(shown, options):
    env = {**os.environ, "FOREBAY_NODE": shown.url}
    command = [sys.executable, "-m", "forebay", "show", "bk/table/", *options]
    with open("/dev/full", "w") as full:
        failed = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, env=env
        )
    assert failed.returncode == 1, failed.stderr
    said = "cannot write to stdout: No space left on device"
    if options:
        error = json.loads(failed.stderr)["error"]
        assert (error["code"], error["message"]) == ("internal", said)
    else:
        assert failed.stderr == f"error: {said}\n"
    if not options:
        closed = subprocess.run(
            ["sh", "-c", 'exec "$@" >&-', "sh", *command],
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env=env,
        )
        assert (closed.returncode, closed.stderr) == (
            1,
            "error: cannot write to stdout: it is closed\n",
        )


def test_the_program_alone_says_where_the_command_is():
    code = "import sys; from forebay._forebay import cli_main; sys.exit(cli_main(sys.argv))"
    alone = [sys.executable, "-c", code, "show", "bk/table/", "--rows", "2"]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "show is a command of the Python package" in done.stderr
    assert "pip install forebay" in done.stderr


@pytest.mark.parametrize("command", ["show", "reshard"])
def test_ctrl_c_while_modules_are_loaded_ends_a_command(tmp_path, command):
    tell = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(30)\n"
    # The first module that both load.
    (tmp_path / "argparse.py").write_text(tell)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "forebay", command, "bk/table/", "bk/out/"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
from forebay.__main__ import main
sys.exit(main())
"""


def test_without_numpy_it_says_what_it_lacks():
    def run(*words: str) -> subprocess.CompletedProcess:
        words = (sys.executable, "-c", WITHOUT_NUMPY, "show", *words)
        return subprocess.run(words, capture_output=True, text=True, timeout=60)

    what = "forebay show needs NumPy, which is not installed"
    done = run("--help")
    assert (done.returncode, done.stderr) == (1, f"error: {what}\nhint: pip install numpy\n")
    error = json.loads(run("a/", "--json").stderr)["error"]
    assert (error["code"], error["message"]) == ("unsupported", what)


def test_help_is_a_command_too():
    """Of this package's commands, and of those of the compiled program."""

    def forebay_says(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "forebay", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    for words in ([], ["show"], ["reshard"], ["ls"], ["cluster", "init"]):
        shown = forebay_says("help", *words)
        assert shown == forebay_says(*words, "--help"), words
        assert shown[0] == 0 and "forebay" in shown[1] and not shown[2], words
    assert forebay_says("--node", "help", "help", "show") == forebay_says("show", "--help")
    assert forebay_says("help", "help") == forebay_says("--help")
    code, out, err = forebay_says("help", "nothing")
    assert code == 2 and not out and "'nothing'" in err


def test_an_object_that_is_not_there_is_told_alone(shown):
    done = show(shown, "bk/nothing")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no object exists: bk/nothing\nhint: "), done.stderr
    done = show(shown, "bk/nothing", "bk/samples.tar")
    said = "error: no object exists for 1 of the 2 names that you gave: bk/nothing\n"
    assert done.stderr.startswith(said), done.stderr


def test_names_that_cannot_be_read_are_told(node, origin_s3, scratch):
    for name in ("0.txt", "1\n.txt"):
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/{name}", Body=b"text")
    source = (f"scratch/{scratch}/", "--format", "objects", "--rows", "1")
    done = show(node, *source)
    assert done.returncode == 0 and "rows      1\n" in done.stdout, done.stderr
    said = "1 name like this cannot be read through this node"
    assert f"left out  scratch/{scratch}/1\\n.txt: {said}\n" in done.stdout, done.stdout
    (left_out,) = json.loads(show(node, *source, "--json").stdout)["left_out"]
    assert left_out == {"name": f"scratch/{scratch}/1\n.txt", "message": said}


def test_members_of_tars_are_shown_as_what_webdataset_takes_them_for(shown):
    done = show(shown, "bk/samples.tar")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.partition("row 0")[2].splitlines()]
    for line in ("cls 7", "index 5 bytes", "txt a café <b>", "old.txt 1 byte", 'json {"a": 1}'):
        assert line in lines, done.stdout
    (row,) = json.loads(show(shown, "bk/samples.tar", "--json").stdout)["first"]
    assert row["cls"] == 7 and row["txt"] == "a café <b>"
    assert row["index"] == {"kind": None, "bytes": 5}
    ds = forebay.open("bk/samples.tar", url=shown.url)
    batch = next(iter(ds.loader(batch_size=1, output="rows")))
    for of in (ds, ds.take(1), forebay.concatenate([ds, ds]), ds.take([0]), batch):
        page = of._repr_html_()
        assert "<td>7</td>" in page and "<td>a café &lt;b&gt;</td>" in page
        assert "<td>5 bytes</td>" in page and "<td>1 byte</td>" in page
    # Rows themselves have bytes.
    assert bytes(ds[0]["cls"]) == b"7\n"
