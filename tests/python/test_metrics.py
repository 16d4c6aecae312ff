"""The metrics and the alerts that ship, as Prometheus' own tool reads them."""

import fcntl
import os
import pty
import select
import shutil
import struct
import subprocess
import termios
import time
import urllib.request
from pathlib import Path

import pytest
from servers import CACHE, Node, forebay_program

ROOT = Path(__file__).parents[2]
PROMTOOL = shutil.which("promtool") or CACHE / "bin" / "promtool"

needs_promtool = pytest.mark.skipif(
    not Path(PROMTOOL).exists(), reason="tests/servers/install.sh promtool installs it"
)


def promtool(*args: str, stdin: str | None = None) -> str:
    done = subprocess.run([PROMTOOL, *args], input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_promtool
def test_the_page_is_what_prometheus_expects(node: Node):
    page = urllib.request.urlopen(f"http://127.0.0.1:{node.admin_port}/metrics", timeout=60)
    text = page.read().decode()
    assert "forebay_requests_total" in text
    assert promtool("check", "metrics", stdin=text) == ""


@needs_promtool
def test_the_alerts_and_the_scrape_configuration_are_sound():
    assert "SUCCESS" in promtool("check", "rules", str(ROOT / "deploy" / "alerts.yml"))
    assert "SUCCESS" in promtool("check", "config", str(ROOT / "deploy" / "prometheus.yml"))


@needs_promtool
def test_the_alerts_of_clusters_and_checkpoints_fire_when_they_should():
    assert "SUCCESS" in promtool("test", "rules", str(ROOT / "tests" / "python" / "alerts.yml"))


def test_the_alerts_ask_for_metrics_that_there_are(node: Node):
    text = (ROOT / "deploy" / "alerts.yml").read_text()
    told = {name.split("{")[0] for name in node.metrics()}
    declared = (ROOT / "docs" / "METRICS.md").read_text()
    names = text.replace("{", " ").replace("(", " ").replace("[", " ").replace(")", " ").split()
    names = {w for w in names if w.startswith("forebay_")}
    assert len(names) > 8
    for name in names:
        assert f"`{name}`" in declared, name
    assert "forebay_ready" in told


def test_top_on_a_narrow_terminal_keeps_one_line_a_line(node: Node):
    """And its first page, before anything was measured, has the disk."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    command = [forebay_program(), "top", "--interval", "1h", "--this-node"]
    where = {"FOREBAY_NODE": f"http://127.0.0.1:{node.port}", "TERM": "xterm"}
    top = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **where}
    )
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 90
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 1)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # It has ended.
                break
        if b"\x1b[J" in shown and b"\x1b[?7h" not in shown:
            os.write(ours, b"q")
    assert top.wait(60) == 0
    os.close(ours)
    cut, whole = shown.find(b"\x1b[?7l"), shown.find(b"\x1b[?7h")
    assert 0 <= cut < shown.find(b"served") < whole, "lines are cut while it runs, and only then"
    assert b"memory" in shown
