"""Threads, forks, signals, pickles: the client in the middle of what training scripts do."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import forebay
import pytest
from scripted_node import ScriptedNode, chunked, tar_of
from servers import Node, accepts, forebay_program, free_port

NAMES = [f"train/img/{i:04}.bin" for i in range(200)]


def read_all(client, names=NAMES) -> list[bytes]:
    return [bytes(item) for item in client.batch(names)]


def read_and_report(client, names, out) -> None:
    out.put(read_all(client, names))


@pytest.fixture(scope="module")
def expect(objects):
    return [objects[n.removeprefix("train/")] for n in NAMES]


@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_a_client_works_in_other_processes_and_here_afterwards(client, expect, way):
    assert read_all(client) == expect
    context = multiprocessing.get_context(way)
    out = context.Queue()
    children = [
        context.Process(target=read_and_report, args=(client, NAMES, out)) for _ in range(2)
    ]
    for child in children:
        child.start()
    for _ in range(20):
        assert read_all(client) == expect
    assert [out.get(timeout=60) for _ in children] == [expect, expect]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert read_all(client) == expect


def test_a_process_that_may_start_no_threads_is_told_so():
    program = """if True:
        import os, resource, forebay
        client = forebay.Client("http://127.0.0.1:9", timeout=1)
        if os.getuid() == 0:
            os.setuid(54321)  # the limit does not hold for root
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        try:
            client.get("bucket/key")
        except forebay.Error as e:
            print(e)
    """
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert "cannot start the client's threads" in done.stdout, done.stderr
    assert "ulimit -u" in done.stdout


def test_a_loop_goes_on_with_the_threads_that_there_are(tables, monkeypatch):
    ds = forebay.open("tables/a/*.parquet", url=tables.url)
    start, begun = threading.Thread.start, []

    def scarce(thread):
        """One of each pool, and then no more."""
        pool = thread.name.rpartition("_")[0]
        if pool in begun:
            raise RuntimeError("can't start new thread")
        begun.append(pool)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    loader = ds.loader(batch_size=8, uneven="pad", threads=3, decode=lambda row: row["id"])
    assert [i for batch in loader for i in batch][: len(ds)] == list(range(len(ds)))
    assert [row["id"] for row in ds] == list(range(len(ds)))
    assert {"forebay-fetch", "forebay-decode", "forebay-iterate"} <= set(begun)
    # Without any, it is an error.
    begun += ["forebay-fetch"]
    with pytest.raises(RuntimeError, match="new thread"):
        next(iter(ds.loader(batch_size=8)))


def in_fork(work) -> int:
    """The exit status of `work` in a forked child; it has a minute."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(status)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def test_forks_while_other_threads_are_in_the_middle_of_batches(client, expect):
    stop = threading.Event()
    failures = []

    def busy():
        try:
            while not stop.is_set():
                assert read_all(client) == expect
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for t in threads:
        t.start()
    try:
        for _ in range(10):

            def work():
                assert read_all(client) == expect
                assert bytes(client.get(NAMES[5])) == expect[5]

            assert in_fork(work) == 0
    finally:
        stop.set()
        for t in threads:
            t.join(60)
    assert not failures


def test_a_batch_from_before_the_fork(client, expect):
    complete = client.batch(NAMES).wait()
    with ScriptedNode({"bucket/k": b"x" * 100_000}) as slow:
        slow.script.append(
            lambda http, request: chunked(
                http, tar_of(slow.members(http.path, request)), pause=0.02
            )
        )
        arriving = forebay.Client(slow.url).batch(["bucket/k"])

        def work():
            assert [bytes(i) for i in complete] == expect
            try:
                arriving[0]
            except forebay.Error as error:
                assert "forked" in str(error)
            else:
                raise AssertionError("a batch of the parent came to its end in the child")
            del globals()["unused_reference"]

        globals()["unused_reference"] = arriving
        assert in_fork(work) == 0
        assert len(bytes(arriving[0])) == 100_000
        globals().pop("unused_reference")


def test_many_threads(client, expect):
    with ThreadPoolExecutor(16) as pool:
        batches = list(pool.map(lambda _: read_all(client), range(64)))
        assert all(b == expect for b in batches)
        gets = list(pool.map(lambda n: bytes(client.get(n)), NAMES))
        assert gets == expect


def test_many_threads_read_one_batch(client, expect):
    batch = client.batch_async(NAMES)
    with ThreadPoolExecutor(8) as pool:
        assert all(
            got == expect for got in pool.map(lambda _: [bytes(i) for i in batch], range(16))
        )


def test_a_client_in_a_client_survives_pickling_twice(client, expect):
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(client))))
    assert read_all(again) == expect and again.url == client.url


def test_the_gil_is_free_while_a_call_waits():
    asked, seen = threading.Event(), threading.Event()

    def answers_when_this_goes_on(http, _):
        asked.set()
        assert seen.wait(60)
        chunked(http, tar_of([("bucket/k", b"x")]))

    with ScriptedNode({"bucket/k": b"x"}) as node:
        node.script.append(answers_when_this_goes_on)
        client, got = forebay.Client(node.url), []
        thread = threading.Thread(
            target=lambda: got.append(client.batch(["bucket/k"]).wait()), daemon=True
        )
        thread.start()
        # Were it not, nothing in this process would go on: not this, and not the node.
        assert asked.wait(60)
        seen.set()
        thread.join(60)
        assert got


@pytest.mark.parametrize(
    "call",
    [
        "client.get('bucket/k')",
        "client.put('bucket/k', b'x')",
        "list(client.list('bucket'))",
        "client.batch(['bucket/k'])",
        "client.batch_async(['bucket/k']).wait()",
        "client.batch_async(['bucket/k'])[0]",
        "next(iter(client.batches([['bucket/k']])))[0]",
        "client.archive(['bucket/k'])",
    ],
)
def test_ctrl_c_interrupts_every_wait(call):
    asked = threading.Event()

    def hang(http, _):
        asked.set()
        time.sleep(30)

    with ScriptedNode({"bucket/k": b"x"}) as node:
        node.answer = lambda http, body: hang(http, body)
        script = f"""
            import forebay, time
            client = forebay.Client({node.url!r})
            try:
                {call}
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        """
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
        )
        assert asked.wait(60)
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, _ = child.communicate(timeout=60)
        assert out == "interrupted\n" and time.monotonic() - began < 20


def test_the_interpreter_ends_with_batches_under_way(node):
    script = f"""
        import forebay
        client = forebay.Client({node.url!r})
        batches = [client.batch_async(["train/big/8MiB"] * 4) for _ in range(4)]
        item = client.batch(["train/one"])[0]
        print(bytes(item))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'1'\n", "")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_node_in_the_wheel_stops_on_a_signal(origin, tmp_path, how):
    node = Node(origin.url, ["train"], tmp_path)
    client = forebay.Client(node.url)
    assert bytes(client.get("train/one")) == b"1"
    began = time.monotonic()
    assert node.stop(how, patience=60) == 0 and time.monotonic() - began < 30
    with pytest.raises(forebay.ConnectionFailed):
        client.get("train/one")


def test_a_node_whose_log_cannot_be_written_stops_gracefully(tmp_path):
    """The disk with the log is full, or the program that reads it has ended."""
    (tmp_path / "data").mkdir()
    port = free_port()
    command = [forebay_program(), "serve", "--origin", f"file://{tmp_path / 'data'}"]
    command += ["--listen", f"127.0.0.1:{port}", "--admin", "off", "--unix", "off"]
    with open("/dev/full", "w") as full:
        node = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=full)
    try:
        end = time.monotonic() + 30
        while not accepts(port):
            assert node.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        node.terminate()
        assert node.wait(60) == 0
    finally:
        node.kill()
        node.wait()


def test_a_client_outlives_its_node(origin, tmp_path):
    """A node that comes back at the same addresses is found again, over its socket."""
    first = Node(origin.url, ["train"], tmp_path)
    client = forebay.Client(first.unix_url)
    assert bytes(client.get("train/one")) == b"1"
    first.stop()
    again = Node(origin.url, ["train"], tmp_path, socket=first.socket)
    try:
        assert bytes(client.get("train/one")) == b"1"
    finally:
        again.stop()


def test_the_wheel_brings_the_command_line():
    for command in (["-m", "forebay", "--version"], ["-m", "forebay", "--help"]):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0 and "forebay" in done.stdout
    bad = subprocess.run(
        [sys.executable, "-m", "forebay", "no-such-command"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert bad.returncode == 2 and bad.stdout == "" and "no-such-command" in bad.stderr


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_stay_out_of_the_way(tmp_path, closed):
    """As a daemon is started: what the node opens next must not get the numbers of the streams, for
    its log would be written there.
    """
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_bytes(b"1")
    port = free_port()
    command = [forebay_program(), "serve", "--origin", f"file://{tmp_path / 'data'}"]
    command += ["--listen", f"127.0.0.1:{port}", "--admin", "off", "--unix", "off"]
    command += ["--cache", f"{tmp_path / 'cache'}:1GiB"]
    node = subprocess.Popen(["sh", "-c", f'exec "$@" {closed}', "sh", *command])
    try:
        end = time.monotonic() + 30
        while not accepts(port):
            assert node.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        for number, mark in enumerate(("<&-", ">&-", "2>&-")):
            if mark in closed.split():
                assert os.readlink(f"/proc/{node.pid}/fd/{number}") == os.devnull
        assert bytes(forebay.Client(f"http://127.0.0.1:{port}").get("data/x")) == b"1"
        node.terminate()
        assert node.wait(60) == 0
    finally:
        node.kill()
        node.wait()


@pytest.mark.parametrize("program", [None, "-m"])
def test_what_a_command_says_is_no_result_where_there_is_no_stderr(program):
    command = [sys.executable, "-m", "forebay"] if program else [forebay_program()]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command, "show", "bk/x", "--node", "unix:/nowhere"],
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_ctrl_c_while_the_package_is_imported_as_a_module_ends_the_command(tmp_path):
    package = tmp_path / "forebay"
    package.mkdir()
    for file in Path(forebay.__file__).parent.iterdir():
        if file.name not in ("__pycache__", "_sent.py"):
            (package / file.name).symlink_to(file)
    (package / "_sent.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    )
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))

    def run(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": search},
            capture_output=True,
            text=True,
            timeout=60,
        )

    for how in (["-X", "utf8", "-m", "forebay"], ["-mforebay"], ["-sm", "forebay"]):
        done = run(*how, "--version")
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "interrupted\n")
    # A program of someone else's tells where it was, whatever its arguments are.
    for arguments in ([], ["-m", "forebay"]):
        assert "Traceback" in run("-c", "import forebay", *arguments).stderr


def test_ctrl_c_while_the_package_is_imported_ends_the_command(tmp_path):
    (command,) = entry_points(group="console_scripts", name="forebay")
    script = f"import sys; from {command.module} import {command.attr} as f; sys.exit(f())"

    def run(path: str | None) -> subprocess.CompletedProcess:
        search = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, "-c", script, "--version"],
            env={**os.environ, "PYTHONPATH": search},
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert run(None).stdout.startswith("forebay ")
    (tmp_path / "forebay").mkdir()
    (tmp_path / "forebay" / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    )
    done = run(str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
