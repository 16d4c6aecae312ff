"""A network of one's own, in which links between machines are cut: for tests and for the demo.

Each machine is a network namespace with one interface, and all hang on a router, a namespace too,
which drops what `cut` and `lost` say. None of them has a name, and nothing of this machine's
network is changed: the kernel removes them as soon as no process is in them and nobody holds them
open, also where their maker was killed. Making them takes root; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import socket
import subprocess
from typing import Self

CLONE_NEWNET = 0x4000_0000
LIBC = ctypes.CDLL(None, use_errno=True)
#: Addresses of the machines: 10.77.<number>.2, each in a network of its own.
PREFIX = "10.77"


def _call(name: str, *arguments: int) -> None:
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _here() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def _within(namespace: int):
    """This thread, and the threads and processes that it starts meanwhile, are in `namespace`."""
    before = _here()
    try:
        _call("setns", namespace, CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", before, CLONE_NEWNET)
    finally:
        os.close(before)


def _new() -> int:
    before = _here()
    try:
        _call("unshare", CLONE_NEWNET)
        try:
            return _here()
        finally:
            _call("setns", before, CLONE_NEWNET)
    finally:
        os.close(before)


@functools.cache
def why_not() -> str | None:
    """Why no network can be made here, or None."""
    if not shutil.which("ip"):
        return "the command `ip` is not installed (iproute2)"
    try:
        with Network("a", "b") as network, network.cut("a", "b", ports=[1]):
            pass
    except OSError as e:
        return f"network namespaces take root and CAP_SYS_ADMIN: {e}"
    except subprocess.CalledProcessError as e:
        return f"this kernel makes no such network: {e.stderr.strip()}"
    return None


@functools.cache
def why_not_capped() -> str | None:
    """Why no link can be capped here, or None."""
    if why := why_not():
        return why
    if not shutil.which("tc"):
        return "the command `tc` is not installed (iproute2)"
    try:
        with Network("a") as network, network.capped("a", 1 << 20):
            pass
    except subprocess.CalledProcessError as e:
        return f"this kernel caps no link (sch_tbf): {e.stderr.strip()}"
    return None


class Network:
    """Machines by their names, each of which reaches all others through the router."""

    def __init__(self, *names: str) -> None:
        self.namespaces: dict[str, int] = {}
        self.rules = 0
        self.router = _new()
        try:
            with _within(self.router), open("/proc/sys/net/ipv4/ip_forward", "w") as forward:
                forward.write("1")
            for name in names:
                self._add(name)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str) -> None:
        namespace = self.namespaces[name] = _new()
        number = len(self.namespaces)
        there = f"/proc/{os.getpid()}/fd/{namespace}"
        with _within(self.router):
            peer = ["peer", "name", "eth0", "netns", there]
            _ip("link", "add", self._interface(name), "type", "veth", *peer)
            _ip("addr", "add", f"{PREFIX}.{number}.1/24", "dev", self._interface(name))
            _ip("link", "set", self._interface(name), "up")
        with _within(namespace):
            _ip("addr", "add", f"{PREFIX}.{number}.2/24", "dev", "eth0")
            _ip("link", "set", "eth0", "up")
            _ip("link", "set", "lo", "up")
            _ip("route", "add", "default", "via", f"{PREFIX}.{number}.1")

    def _interface(self, name: str) -> str:
        return f"to-{list(self.namespaces).index(name)}"

    def address(self, name: str) -> str:
        return f"{PREFIX}.{list(self.namespaces).index(name) + 1}.2"

    def inside(self, name: str):
        """This thread is at that machine, and what it starts meanwhile stays there."""
        return _within(self.namespaces[name])

    @contextlib.contextmanager
    def cut(self, a: str, b: str, *, both: bool = True, ports: list[int] | None = None):
        """What `a` sends to `b` is lost, and with `both` what `b` sends to `a`. With `ports`, only
        TCP to and from these ports, wherever they are. Nobody is told: packets vanish.
        """
        ways = [(a, b), (b, a)] if both else [(a, b)]
        made: list[list[str]] = []
        try:
            with _within(self.router):
                for source, target in ways:
                    way = ["iif", self._interface(source), "to", self.address(target)]
                    for port in ports or [None]:
                        for which in ("sport", "dport") if port else (None,):
                            self.rules += 1
                            rule = ["pref", str(self.rules), *way]
                            rule += ["ipproto", "tcp", which, str(port)] if which else []
                            _ip("rule", "add", *rule, "blackhole")
                            made.append(rule)
            yield
        finally:
            with _within(self.router):
                for rule in made:
                    _ip("rule", "del", *rule)

    @contextlib.contextmanager
    def lost(self, name: str):
        """Nothing gets to that machine or comes from it, as when it has failed."""
        ways = (["to", self.address(name)], ["iif", self._interface(name)])
        made: list[list[str]] = []
        try:
            with _within(self.router):
                for way in ways:
                    self.rules += 1
                    rule = ["pref", str(self.rules), *way]
                    _ip("rule", "add", *rule, "blackhole")
                    made.append(rule)
            yield
        finally:
            with _within(self.router):
                for rule in made:
                    _ip("rule", "del", *rule)

    @contextlib.contextmanager
    def capped(self, name: str, bytes_per_second: int):
        """That machine's link carries so much in each direction, whoever speaks: what is too much
        waits, and then is lost, as in a switch.
        """
        rate = ["tbf", "rate", f"{bytes_per_second * 8}bit", "burst", "128kb", "latency", "50ms"]
        ends = [(self.router, self._interface(name)), (self.namespaces[name], "eth0")]
        made: list[tuple[int, str]] = []
        try:
            for namespace, interface in ends:
                with _within(namespace):
                    _tc("add", "dev", interface, "root", *rate)
                made.append((namespace, interface))
            yield
        finally:
            for namespace, interface in made:
                with _within(namespace):
                    _tc("del", "dev", interface, "root")

    def close(self) -> None:
        for namespace in (self.router, *self.namespaces.values()):
            os.close(namespace)
        self.namespaces = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _tc(*words: str) -> None:
    subprocess.run(["tc", "qdisc", *words], check=True, capture_output=True, text=True)


def reaches(host: str, port: int, seconds: float = 1) -> bool:
    try:
        socket.create_connection((host, port), timeout=seconds).close()
        return True
    except OSError:
        return False
