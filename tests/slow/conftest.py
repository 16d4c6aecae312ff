"""The slow suites start their own servers, with the tools of tests/python."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))
# namespaces.py, which the demo has too.
sys.path.append(str(Path(__file__).parents[2] / "tools"))

# As in tests/python: Ctrl-C reaches what is started, and this machine's settings do not.
signal.signal(signal.SIGINT, signal.default_int_handler)
for name in list(os.environ):
    if (
        name.startswith(("AWS_", "FOREBAY_"))
        and name not in ("FOREBAY_CACHE", "FOREBAY_BIN")
        and not name.startswith("FOREBAY_TEST_")
    ):
        del os.environ[name]
