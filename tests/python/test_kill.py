"""A few rounds of what tests/slow does two hundred times."""

from __future__ import annotations

from kill import kill_in_a_loop
from load import seed


def test_a_node_that_is_killed_under_load_comes_back_with_nothing_wrong(tmp_path):
    load = kill_in_a_loop(tmp_path, 5, seed())
    assert load.done["reads"] > 20 and load.done["writes"] > 5, load.done
