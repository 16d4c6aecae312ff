"""Certificate authorities and certificates for the tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def openssl(*args: str | Path, stdin: str = "") -> None:
    done = subprocess.run(
        ["openssl", *map(str, args)], input=stdin, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


class Authority:
    """Our own CA; `file` is what clients trust."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory / name
        self.directory.mkdir(parents=True)
        self.file, self.key = self.directory / "ca.pem", self.directory / "ca.key"
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.key)
        extensions = [
            "-addext",
            "basicConstraints=critical,CA:TRUE",
            "-addext",
            "keyUsage=critical,keyCertSign,cRLSign",
        ]
        openssl(
            "req",
            "-x509",
            "-key",
            self.key,
            "-out",
            self.file,
            "-days",
            "30",
            "-subj",
            f"/CN={name}",
            *extensions,
        )

    def issue(
        self, name: str, san: str = "IP:127.0.0.1,DNS:localhost", days: int = 10
    ) -> tuple[Path, Path]:
        """A certificate for `san` and its key."""
        cert, key, request = (self.directory / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
        openssl("req", "-new", "-key", key, "-out", request, "-subj", f"/CN={name}")
        extensions = self.directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={san}\nextendedKeyUsage=serverAuth\n")
        signing = ["-CA", self.file, "-CAkey", self.key, "-CAcreateserial", "-extfile", extensions]
        openssl("x509", "-req", "-in", request, "-out", cert, "-days", str(days), *signing)
        return cert, key
