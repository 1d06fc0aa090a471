"""Count, fail or cut short the system calls of a forked child, whoever makes them: Python, torch, Rust or glibc.

The kernel hands each call to this process before it happens (seccomp_unotify(2), Linux 5.6 on x86-64), which lets it
go on, answers it with an error, or kills the child. Two kinds of calls are counted: those on files below a folder, and
those for memory. Every allocation of 4 KiB or more is such a call, and smaller ones where the heap grows: the operation
runs in a thread with a heap of its own, which has nothing free. Only that thread counts: a thread of Python that finds
no memory to begin makes the one that starts it wait for ever. Closing is not counted: Linux closes in any case.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import pickle
import platform
import posix
import posixpath
import select
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest

from protokv.errors import ProtoKVError

LINUX = sys.platform == "linux" and platform.machine() == "x86_64"
needs_linux = pytest.mark.skipif(not LINUX, reason="the kernel's own interface, of Linux on x86-64")

# Calls by the arguments that name their files: a descriptor, a path, or a folder's descriptor and a path.
_NUMBERS = {
    (("fd", 0),): {
        "read": 0, "write": 1, "fstat": 5, "lseek": 8, "pread": 17, "pwrite": 18, "writev": 20, "fcntl": 72,
        "flock": 73, "fsync": 74, "fdatasync": 75, "ftruncate": 77, "fchmod": 91, "getdents": 217, "fallocate": 285,
    },
    (("fd", 4),): {"mmap": 9},
    (("fd", 0), ("fd", 1)): {"sendfile": 40},
    (("fd", 0), ("fd", 2)): {"copy_file_range": 326},
    (("path", 0),): {
        "open": 2, "stat": 4, "lstat": 6, "access": 21, "truncate": 76, "mkdir": 83, "rmdir": 84, "unlink": 87,
        "readlink": 89, "chmod": 90,
    },
    (("path", 0), ("path", 1)): {"rename": 82, "link": 86},
    (("at", 0),): {
        "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "readlinkat": 267, "faccessat": 269,
        "utimensat": 280, "statx": 332, "faccessat2": 439,
    },
    (("at", 0), ("at", 2)): {"renameat": 264, "linkat": 265, "renameat2": 316},
    (): {"mprotect": 10, "brk": 12, "mremap": 25},
}  # fmt: skip
_CALLS = {number: (name, places) for places, named in _NUMBERS.items() for name, number in named.items()}

_WRITES = {"write", "pwrite"}
# Calls that may take space on a disk.
TAKES_SPACE = {
    *_WRITES, "writev", "open", "openat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "link", "linkat",
    "fsync", "fdatasync", "ftruncate", "fallocate", "sendfile", "copy_file_range",
}  # fmt: skip
# Calls that a signal may interrupt.
WAITS = {"open", "openat", "read", "pread", "write", "pwrite", "writev", "fsync", "fdatasync", "flock", "fcntl"}
# Calls that look for a right.
ASKS = {name for name, places in _CALLS.values() if places and places[0][0] != "fd"}

_MEMORY = ("mprotect", "brk", "mremap")
_MAP_ANONYMOUS, _PROT_WRITE, _HERE = 0x20, 2, 0xFFFFFF9C
_RECEIVE, _SEND, _GO_ON = 0xC0502100, 0xC0182101, 1
_M_MMAP_THRESHOLD, _M_TOP_PAD = -3, -2

# Threads are told apart by their numbers modulo this.
_THREADS = 1 << 12

# This many pieces of 2 KiB fill a new heap.
_FILL = 128

# The child tells the begin and the end of its operation by asking for these.
_BEGIN, _END = b"/protokv-begin", b"/protokv-end"

KILL = 0
Kind = Literal["files", "memory"]


@dataclass(frozen=True)
class Fault:
    """What happens at counted call number `at`, from 1; 0: nothing.

    Attributes:
        at: number of the call, among those with one of the `names`, if any are given.
        error: the errno that it ends with; KILL: the process is killed before it, or in the middle of a write.
        kind: which calls count.
        lasting: later calls fail like this one.
        names: calls that count.
    """

    at: int = 0
    error: int = KILL
    kind: Kind = "files"
    lasting: bool = False
    names: frozenset[str] | None = None


@dataclass
class Ended:
    """How a child ended: its counted calls up to the fault, its status, what its operation returned or raised.

    `first` numbers the first call at each place of the program, if they were asked for.
    """

    calls: list[str] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    status: int = 0
    value: Any = None
    error: tuple[str, bool, str, str] | None = None

    @property
    def failed_call(self) -> str:
        return self.calls[-1] if self.calls else ""


def run(operation: Callable[[], Any], root: Path, fault: Fault = Fault(), *, places: bool = False) -> Ended:
    """Call `operation` in a forked child while counting its calls, and let one of them fail.

    A place of the program is the name of a call and the Python stack behind it.
    """
    stacks = mmap.mmap(-1, 8 * _THREADS) if places else None
    mine, theirs = socket.socketpair()
    with mine, warnings.catch_warnings():
        # Python warns of threads; none of them holds a lock that the child needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if not child:
            _serve(operation, theirs, fault.kind, stacks)
        theirs.close()
        _, received, _, _ = socket.recv_fds(mine, 1, 1)
        if not received:
            os.waitpid(child, 0)
            pytest.skip("the kernel does not let calls be watched here")
        (listener,) = received
        watched = _Watched(child, os.path.realpath(root), fault, stacks)
        try:
            mine.send(b"g")
            answer = watched.follow(listener, mine)
        finally:
            os.close(listener)
            watched.close()
            _, status = os.waitpid(child, 0)
    ended = Ended(watched.calls, [*watched.places.values()], os.waitstatus_to_exitcode(status))
    if answer:
        ended.value, ended.error = pickle.loads(answer)
    return ended


def _note_stacks(stacks: mmap.mmap) -> None:
    """Keep in `stacks` a number of the stack of each thread of this process."""

    def note(frame: FrameType | None, *_: Any) -> None:
        found = 0
        while frame is not None:
            found, frame = hash((found, frame.f_code, frame.f_lasti)), frame.f_back
        struct.pack_into("q", stacks, threading.get_native_id() % _THREADS * 8, found)

    threading.setprofile(note)
    sys.setprofile(note)


def _serve(operation: Callable[[], Any], to: socket.socket, kind: Kind, stacks: mmap.mmap | None) -> None:
    """Be the child: hand the listener over, wait for the word, call the operation and send what it returned."""
    status, mark = 1, _libc()
    os.fsync = posix.fsync  # tests/conftest.py lets the others not wait for it
    try:
        for number, value in ((_M_MMAP_THRESHOLD, 4096), (_M_TOP_PAD, 0)):
            mark.mallopt(number, value)
        listener = _install(memory=kind == "memory")
        socket.send_fds(to, [b"l"], [listener])
        os.close(listener)
        to.recv(1)
        told: list[tuple[Any, Any]] = []

        def act() -> None:
            try:
                for _ in range(_FILL if kind == "memory" else 0):
                    mark.malloc(2048)
                mark.access(_BEGIN, 0)
                if stacks is not None:
                    _note_stacks(stacks)
                told.append((operation(), None))
            except BaseException as caught:
                ours = isinstance(caught, ProtoKVError)
                told.append((None, (type(caught).__name__, ours, str(caught), getattr(caught, "hint", ""))))
            finally:
                mark.access(_END, 0)

        if kind == "memory":
            thread = threading.Thread(target=act)
            thread.start()
            thread.join()
        else:
            act()
        to.sendall(pickle.dumps(told[0]))
        status = 0
    finally:
        os._exit(status)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _install(*, memory: bool) -> int:
    """Let the kernel ask before each call of this process from now on; return the descriptor where it asks."""
    wanted = {*_MEMORY, "mmap", "access"} if memory else {name for name, _ in _CALLS.values()} - {*_MEMORY}
    asked = [number for number, (name, _) in _CALLS.items() if name in wanted]
    code = [(0x20, 0, 0, 0)]
    code += [(0x15, len(asked) - i, 0, number) for i, number in enumerate(asked)]
    code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x7FC00000)]
    program = b"".join(struct.pack("HBBI", *one) for one in code)
    buffer = ctypes.create_string_buffer(program)
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer)))
    libc = _libc()
    # PR_SET_NO_NEW_PRIVS; seccomp(SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER).
    if libc.prctl(38, 1, 0, 0, 0) or (listener := libc.syscall(317, 1, 8, head)) < 0:
        raise OSError(ctypes.get_errno(), "the kernel does not let calls be watched")
    return int(listener)


class _Watched:
    """The calls of a child."""

    def __init__(self, child: int, root: str, fault: Fault, stacks: mmap.mmap | None) -> None:
        self.calls: list[str] = []
        self.places: dict[tuple[str, int], int] = {}
        self._stacks = stacks
        self._child, self._root, self._fault = child, root, fault
        self._memory: dict[int, int] = {}
        self._thread = 0

    def close(self) -> None:
        for number in self._memory.values():
            os.close(number)

    def follow(self, listener: int, answers: socket.socket) -> bytes:
        """Answer the kernel until the child has ended; return what the child sent."""
        poll, answer = select.poll(), b""
        poll.register(listener, select.POLLIN)
        poll.register(answers, select.POLLIN)
        while True:
            for number, event in poll.poll():
                if number == listener and event & select.POLLIN:
                    self._answer(listener)
                elif number == listener:
                    poll.unregister(listener)
                elif piece := answers.recv(1 << 16):
                    answer += piece
                else:
                    # Other threads of the child may still ask until it has ended.
                    poll.unregister(answers)
                    return answer

    def _answer(self, listener: int) -> None:
        asked = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, asked)
        except OSError:
            return  # it was killed meanwhile
        key, thread, _, number, _, _, *arguments = struct.unpack("QIIiIQ6Q", asked)
        error = self._judge(thread, number, arguments)
        if error == KILL:
            os.kill(self._child, signal.SIGKILL)
            return
        answer = struct.pack("QqiI", key, 0, 0, _GO_ON) if error is None else struct.pack("QqiI", key, 0, -error, 0)
        try:
            fcntl.ioctl(listener, _SEND, answer)
        except OSError as gone:
            if gone.errno != errno.ENOENT:
                raise

    def _judge(self, thread: int, number: int, arguments: list[int]) -> int | None:
        """Return the error of a call; None lets it go on."""
        name, fault = _CALLS[number][0], self._fault
        if len(self.calls) >= fault.at > 0 and not fault.lasting:
            return None
        if name == "access" and (path := self._path(thread, "path", arguments).encode()) in (_BEGIN, _END):
            self._thread = thread if path == _BEGIN else 0
        if not self._thread or not self._counts(thread, number, arguments) or (fault.names and name not in fault.names):
            return None
        self.calls.append(name)
        if self._stacks is not None:
            (stack,) = struct.unpack_from("q", self._stacks, thread % _THREADS * 8)
            self.places.setdefault((name, stack), len(self.calls))
        if not fault.at or len(self.calls) < fault.at:
            return None
        if name in _WRITES and fault.error in (errno.ENOSPC, KILL):
            self._write_half(thread, arguments)
        return fault.error

    def _counts(self, thread: int, number: int, arguments: list[int]) -> bool:
        name, places = _CALLS[number]
        anonymous = name in _MEMORY or (name == "mmap" and bool(arguments[3] & _MAP_ANONYMOUS))
        if self._fault.kind == "memory":
            # Asking for the end of the heap, and taking rights away, need no memory.
            free = {"brk": arguments[0] == 0, "mprotect": not arguments[2] & _PROT_WRITE}
            return anonymous and thread == self._thread and not free.get(name, False)
        return not anonymous and any(
            self._path(thread, how, arguments[at:]).startswith(self._root) for how, at in places
        )

    def _path(self, thread: int, how: str, arguments: list[int]) -> str:
        path = "" if how == "fd" else os.fsdecode(self._read(thread, arguments[how == "at"], 4096).partition(b"\0")[0])
        if path.startswith("/"):
            return path
        folder = "cwd" if how == "path" or arguments[0] & 0xFFFFFFFF == _HERE else f"fd/{arguments[0] & 0xFFFFFFFF}"
        try:
            return posixpath.join(posix.readlink(f"/proc/{thread}/{folder}"), path)
        except OSError:
            return ""

    def _read(self, thread: int, address: int, size: int) -> bytes:
        """Return up to `size` bytes of the child's memory."""
        if thread not in self._memory:
            self._memory[thread] = os.open(f"/proc/{thread}/mem", os.O_RDONLY)
        # Beyond the page there may be nothing.
        size = min(size, 4096 - address % 4096) if size == 4096 else size
        found = os.pread(self._memory[thread], size, address)
        if len(found) == 4096 - address % 4096 and b"\0" not in found and size < 4096:
            found += os.pread(self._memory[thread], 4096, address + len(found))
        return found

    def _write_half(self, thread: int, arguments: list[int]) -> None:
        """Write what a disk takes before it is full, or before the process is killed."""
        half = self._read(thread, arguments[1], arguments[2] // 2)
        process = os.pidfd_open(self._child)
        copy = _libc().syscall(438, process, arguments[0] & 0xFFFFFFFF, 0)
        os.write(copy, half)
        os.close(copy)
        os.close(process)
