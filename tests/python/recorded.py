"""Recorded answers of a real node, for those who play one.

`tests/recorded/answers.json` holds answers of a real node by name. `test_recorded.py` checks that a
node still says the same, and writes the file anew with `FOREBAY_RECORD=1`. A fake makes its answers
of these, so that it cannot say what no node says. What differs from run to run (ids, dates,
addresses) is a word in angle brackets there.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).parent.parent / "recorded" / "answers.json"


def answers() -> dict:
    """All recorded answers: `status`, `headers` and `body` by name."""
    return json.loads(FILE.read_text())


def error(status: int, code: str, message: str, hint: str | None = None) -> bytes:
    """The document of this error, in the form of the one that a node was recorded to send about a
    batch that it cannot read.
    """
    document = answers()["bad_batch"]["body"]
    document.pop("where", None)
    for name, value in {"status": status, "code": code, "message": message}.items():
        assert name in document, f"no node says {name}"
        document[name] = value
    assert "hint" in document, "no node says hint"
    if hint is None:
        del document["hint"]
    else:
        document["hint"] = hint
    return json.dumps(document).encode()


def refusal(name: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of a recorded error."""
    answer = answers()[name]
    headers = {k: v for k, v in answer["headers"].items() if k == "retry-after"}
    return answer["status"], json.dumps(answer["body"]).encode(), headers


def info(**known: str) -> dict:
    """What a node says about itself, with these values filled in."""
    said = answers()["info"]["body"]
    for name, value in known.items():
        assert name in said, f"no node says {name}"
        said[name] = value
    return said
