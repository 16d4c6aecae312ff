"""`kill -9` in a loop under checkpoints: what was called durable is whole at the origin, what was
called staged becomes durable, none is ever visible in part, and nothing is left behind.

FOREBAY_TEST_KILLS says how many times (100).
"""

from __future__ import annotations

import os

import pytest
from checkpoint_kill import kill_under_checkpoints
from load import seed


@pytest.mark.timeout(1800)
def test_checkpoints_through_a_hundred_kills(tmp_path):
    kills = int(os.environ.get("FOREBAY_TEST_KILLS", "100"))
    done = kill_under_checkpoints(tmp_path, kills, seed())
    assert done["staged"] > kills and done["durable"] > kills // 2, done
