"""`kill -9` in a loop under load: no wrong byte, no acknowledged write lost, ready again within
seconds, never over the cache's size.

FOREBAY_TEST_KILLS says how many times (200).
"""

from __future__ import annotations

import os

from kill import kill_in_a_loop
from load import seed


def test_nothing_is_wrong_after_two_hundred_kills(tmp_path):
    kills = int(os.environ.get("FOREBAY_TEST_KILLS", "200"))
    load = kill_in_a_loop(tmp_path, kills, seed())
    assert (
        load.done["reads"] > 10 * kills
        and load.done["writes"] > kills
        and load.done["batches"] > kills
    ), load.done
