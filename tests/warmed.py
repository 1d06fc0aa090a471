"""Processes forked from one that has loaded everything: `protokv` as a process of its own, without the seconds that
importing torch and transformers takes, and the process that decodes.

Run as a script, this is the one that forks. Each message on its socket is one job, with the pipes of a process; for
each it forks a guardian, which forks the process and says its id and, in the end, its exit code. Whatever that does
after its imports is as it always is: its signals, its streams and the end of its interpreter. What importing itself
must and must not do is seen from programs that begin at the beginning, in `test_main.py` and `test_endings.py`, and
from decoders in `tests/video` and of every program here.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self


class Warmed:
    """The side of the tests: starts processes, any number side by side. What forks them starts with the first."""

    def __init__(self, kind: str = "program") -> None:
        """Args: `kind`: "program", or "decoder"."""
        self._kind, self._starting = kind, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, arguments: list[str], folder: Path, environment: dict[str, str], *, new_session: bool = False
    ) -> WarmedProgram:
        """`protokv ARGUMENTS` in a folder."""
        stdin, stdout, stderr, report = (os.pipe() for _ in range(4))
        # Where the system can, a pipe holds a page: a program that says a line a step waits for the test that reads it.
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            fcntl.fcntl(stdout[0], fcntl.F_SETPIPE_SZ, 4096)
        job = {
            "arguments": arguments,
            "folder": str(folder),
            "environment": environment,
            "new_session": new_session,
        }
        self._send(job, [stdin[0], stdout[1], stderr[1], report[1]])
        return WarmedProgram(stdin[1], stdout[0], stderr[0], report[0])

    def start_decoder(self) -> WarmedDecoder:
        """`protokv.video.worker` in the current folder."""
        stdin, stdout, report = (os.pipe() for _ in range(3))
        job = {"folder": str(Path.cwd()), "environment": dict(os.environ), "new_session": True}
        self._send(job, [stdin[0], stdout[1], os.open(os.devnull, os.O_WRONLY), report[1]])
        return WarmedDecoder(stdin[1], stdout[0], report[0])

    def _send(self, job: dict[str, object], theirs: list[int]) -> None:
        with self._starting:
            if self._process is None:
                self._socket, socket_ = socket.socketpair()
                # Not as a module: what is imported is what was installed, as for a user.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__, self._kind, str(socket_.fileno())],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    pass_fds=[socket_.fileno()],
                )
                socket_.close()
            socket.send_fds(self._socket, [json.dumps(job).encode()], theirs)
        for end in theirs:
            os.close(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.wait(timeout=60)


class Forked:
    """What the tests use of `subprocess.Popen`, as it does it."""

    def __init__(self, report: int) -> None:
        self._report: IO[bytes] = open(report, "rb", buffering=0)  # noqa: SIM115
        self.returncode: int | None = None
        self._ending = threading.Lock()
        self.pid = int(self._report.readline())

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            # Its number may be another's once it is gone; the guardian has said so by then, or soon will.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or the negative number of the signal that ended it."""
        with self._ending:
            if self.returncode is None:
                if not select.select([self._report], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("protokv", timeout or 0)
                self.returncode = int(self._report.readline())
                self._report.close()
        return self.returncode


class WarmedDecoder(Forked):
    """The process that decodes: pipes for requests and messages."""

    def __init__(self, stdin: int, stdout: int, report: int) -> None:
        self.stdin: IO[bytes] = open(stdin, "wb")  # noqa: SIM115
        self.stdout: IO[bytes] = open(stdout, "rb")  # noqa: SIM115
        super().__init__(report)


class WarmedProgram(Forked):
    """The program; its streams are text, and all three are pipes."""

    def __init__(self, stdin: int, stdout: int, stderr: int, report: int) -> None:
        self.stdin: IO[str] = open(stdin, "w", encoding="utf-8")  # noqa: SIM115
        self.stdout: IO[str] = open(stdout, encoding="utf-8")  # noqa: SIM115
        self.stderr: IO[str] = open(stderr, encoding="utf-8")  # noqa: SIM115
        super().__init__(report)

    def communicate(self, input: str = "", *, timeout: float) -> tuple[str, str]:
        """Write, read all that it says, and wait."""
        said: dict[str, str] = {}

        def read(name: str, stream: IO[str]) -> None:
            said[name] = stream.read()

        streams = {"out": self.stdout, "err": self.stderr}
        readers = [threading.Thread(target=read, args=item, daemon=True) for item in streams.items()]
        for reader in readers:
            reader.start()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(input)
            self.stdin.close()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return said["out"], said["err"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.kill()
        self.wait(timeout=60)


def _guard(job: dict[str, object], streams: list[int], report: int) -> None:
    """Fork the program and wait for it; comes back in the program, and only there."""
    program = os.fork()
    if program == 0:
        if job["new_session"]:
            os.setsid()
        # Whoever started the tests may have done so with nohup.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.close(report)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return
    for stream in streams:
        os.close(stream)
    os.write(report, f"{program}\n".encode())
    os.write(report, f"{os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])}\n".encode())
    os._exit(0)


def _serve(jobs: socket.socket) -> dict[str, object]:
    """Fork a guardian for each job until nobody sends any; comes back in each program with its job."""
    guardians: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(jobs, 1 << 20, 4)
        guardians -= {pid for pid in guardians if os.waitpid(pid, os.WNOHANG)[0]}
        if not message:
            sys.exit()
        job, (*streams, report) = json.loads(message), fds
        if guardian := os.fork():
            guardians.add(guardian)
            for fd in fds:
                os.close(fd)
            continue
        jobs.close()
        _guard(job, streams, report)
        return job


def _load_program() -> Callable[[], None]:
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401
    import zarr  # noqa: F401

    import protokv.backbones
    import protokv.ingestion
    import protokv.replay
    import protokv.storage.checkpoint
    import protokv.video  # noqa: F401
    from protokv_cli.main import run

    return run


def _load_decoder() -> Callable[[], None]:
    import protokv.video.pyav_source
    import protokv.video.registry  # noqa: F401
    from protokv.video.worker import main

    return main


def _main() -> None:
    run = {"program": _load_program, "decoder": _load_decoder}[sys.argv[1]]()
    gc.freeze()
    job = _serve(socket.socket(fileno=int(sys.argv[2])))
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    if constants := sys.modules.get("huggingface_hub.constants"):
        # What a program's environment says of the hub is read when this is loaded.
        importlib.reload(constants)
    sys.argv = ["protokv", *job.get("arguments", [])]
    run()


if __name__ == "__main__":
    _main()
