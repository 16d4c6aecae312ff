"""Where the processes of the cluster's demo are: each at a machine of its own, which is a network
namespace, or all on loopback where such machines cannot be made.
"""

import contextlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import namespaces


class Loopback:
    """No machines: nodes have addresses of their own on this one."""

    def __init__(self, nodes: tuple[str, ...]):
        self.addresses = {name: f"127.0.0.{11 + i}" for i, name in enumerate(nodes)}

    def address(self, name: str) -> str:
        return self.addresses.get(name, "127.0.0.1")

    def inside(self, name: str):
        return contextlib.nullcontext()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass


def made(nodes: tuple[str, ...], others: tuple[str, ...], loopback: bool):
    """The network, and what it is in words."""
    why = "as was asked for" if loopback else namespaces.why_not()
    if why is None:
        return namespaces.Network(*nodes, *others), "a network namespace each"
    return Loopback(nodes), f"loopback ({why})"
