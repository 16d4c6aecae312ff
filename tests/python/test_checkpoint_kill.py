"""A few rounds of what tests/slow does a hundred times."""

from __future__ import annotations

from checkpoint_kill import kill_under_checkpoints
from load import seed


def test_checkpoints_through_a_node_that_is_killed(tmp_path):
    done = kill_under_checkpoints(tmp_path, 6, seed())
    assert done["staged"] >= 4 and done["looks"] >= 4, done
