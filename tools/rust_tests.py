"""Compiles the Rust tests and runs them: each program as soon as it is compiled, two at a time.

Most of their time is waiting, so they cost little beside the compiler. What a program prints is
shown when it has ended. One that hangs is ended after half an hour, with exit status 124; the test
that it hung in is named in what it printed.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor

SECONDS_MAX = 1800
CARGO = ["cargo", "test", "--release", "--locked"]
# Not the examples, which clippy checks.
PROGRAMS = ["--lib", "--bins", "--tests"]
# As much as a main thread has, on which a node reads its configuration; by default tests have less.
STACK_BYTES = 8 << 20

shown = threading.Lock()


def main() -> int:
    environment = os.environ | {
        "LD_LIBRARY_PATH": libraries(),
        "RUST_MIN_STACK": str(STACK_BYTES),
    }
    # Programs that run a binary of their package wait for it: cargo compiles it beside them, not
    # before. Until then there is none, or that of an earlier run.
    waiting: list[tuple[str, pathlib.Path]] = []
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2)) as runners:
        build = subprocess.Popen(
            [*CARGO, *PROGRAMS, "--no-run", "--message-format=json-render-diagnostics"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert build.stdout is not None
        ran = []
        for line in build.stdout:
            message = json.loads(line)
            program = message.get("executable")
            if message["reason"] != "compiler-artifact" or not program:
                continue
            manifest = pathlib.Path(message["manifest_path"])
            if not message["profile"]["test"]:
                # As cargo tells the programs that it runs.
                environment[f"CARGO_BIN_EXE_{message['target']['name']}"] = program
            elif "test" in message["target"]["kind"] and has_binaries(manifest):
                waiting.append((program, manifest.parent))
            else:
                ran.append(runners.submit(run, program, manifest.parent, environment))
        failed = build.wait() != 0
        ran += [runners.submit(run, program, of, environment) for program, of in waiting]
        failed |= not all(passed.result() for passed in ran)
    if not ran:
        print("no test program was compiled", file=sys.stderr)
        return 1
    # Examples in comments.
    examples = subprocess.run([*CARGO, "--no-fail-fast", "--doc"], check=False)
    failed |= examples.returncode != 0
    return int(failed)


def has_binaries(manifest: pathlib.Path) -> bool:
    """Whether a package's manifest names binaries of its own."""
    return "bin" in tomllib.loads(manifest.read_text())


def libraries() -> str:
    """Where the shared libraries of Rust itself are, as cargo tells the programs that it runs."""
    command = ["rustc", "--print", "target-libdir"]
    ours = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return ":".join(filter(None, [ours, os.environ.get("LD_LIBRARY_PATH")]))


def run(program: str, package: pathlib.Path, environment: dict[str, str]) -> bool:
    """Runs one program of tests in the folder of its package. Whether it passed."""
    environment = environment | {"CARGO_MANIFEST_DIR": str(package)}
    with tempfile.TemporaryFile() as said:
        ended = subprocess.run(
            ["timeout", "--foreground", str(SECONDS_MAX), program],
            cwd=package,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            check=False,
        )
        said.seek(0)
        text = said.read().decode(errors="replace")
    with shown:
        print(f"     Running {package.name}: {program}\n{text}", end="")
        if ended.returncode != 0:
            # As cargo says it.
            print(f"  process didn't exit successfully: (exit status: {ended.returncode})")
        sys.stdout.flush()
    return ended.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
