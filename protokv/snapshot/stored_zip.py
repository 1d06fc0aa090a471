"""Reads zip files whose members are stored as they are: where each lies, with nothing left to interpretation.

A zip file can say one thing to one reader and something else to the next, hold members that unpack to terabytes, or
names that climb out of a folder. Here only one kind passes: members uncompressed, not encrypted, each named once in
the directory at the very end and in the same way where it lies, none overlapping another. So every reader sees the
same, and no member is larger than the file. Knows nothing of what the members mean.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from protokv.snapshot.atomic import FileSystem
from protokv.snapshot.document import corrupt, unreadable
from protokv.snapshot.schema import shown

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
# Far more than a state has, and few enough to hold.
_MOST_MEMBERS = 1 << 18
# Sizes behind the member instead of before it, and names in UTF-8.
_FLAGS = 0x0008 | 0x0800


@dataclass(frozen=True, slots=True)
class Member:
    """Bytes `[begin, begin + size)` of the file, and their CRC-32."""

    begin: int
    size: int
    crc: int


class Sink:
    """What writers of zip files write to: a file whose bytes are counted, through a `FileSystem`.

    Attributes:
        written: bytes so far.
        failed: the error of a write, for writers that lose it.
    """

    def __init__(self, file: BinaryIO, fs: FileSystem) -> None:
        self._file, self._fs, self.written = file, fs, 0
        self.failed: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append."""
        try:
            self._fs.write(self._file, data)
        except OSError as error:
            self.failed = error
            raise
        self.written += len(data)
        return len(data)

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._file.flush()

    def close(self) -> None:
        """The file is closed by who opened it."""


def members(file: BinaryIO, path: str | os.PathLike[str]) -> dict[str, Member]:
    """The members of an open zip file by name, none of them read.

    Raises:
        StateCorrupt: It is no zip file of this kind.
    """
    try:
        count, begin, end = _directory(file)
        directory = _read(file, begin, end - begin)
        found: dict[str, Member] = {}
        names: set[str] = set()
        at = 0
        for _ in range(count):
            name, member, at = _entry(file, directory, at, begin)
            # Some readers do not tell upper from lower case.
            if name.lower() in names:
                raise ValueError(f"the member {shown(name)} is there twice")
            names.add(name.lower())
            found[name] = member
        if at != len(directory):
            raise ValueError("the directory is longer than its entries")
        covered = 0
        for name, member in sorted(found.items(), key=lambda item: item[1].begin):
            if member.begin < covered:
                raise ValueError(f"the member {shown(name)} overlaps another")
            covered = member.begin + member.size
        if covered > begin:
            raise ValueError("a member overlaps the directory")
    except (ValueError, struct.error) as error:
        raise corrupt(path, f"zip: {shown(error)}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    return found


def read_member(
    file: BinaryIO, member: Member, path: str | os.PathLike[str], what: str, *, crc: bool = True
) -> NDArray[np.uint8]:
    """The bytes of a member, checked against its CRC unless something stronger is.

    Raises:
        StateCorrupt: They are not what was stored; the message begins with `what`.
    """
    data = np.empty(member.size, np.uint8)
    try:
        file.seek(member.begin)
        found = file.readinto(data.data) if member.size else 0  # type: ignore[attr-defined]
    except OSError as error:
        raise unreadable(path, error) from error
    if found != member.size or (crc and zlib.crc32(data.data) != member.crc):
        raise corrupt(path, f"{what}: its bytes are not those that were saved")
    return data


def _directory(file: BinaryIO) -> tuple[int, int, int]:
    """Entries of the directory, and where it begins and ends."""
    size = file.seek(0, os.SEEK_END)
    tail = size - _END.size
    if tail < 0:
        raise ValueError(f"{size} bytes are no zip file")
    sign, disk, first, here, count, length, begin, comment = _END.unpack(_read(file, tail, _END.size))
    if sign != b"PK\5\6" or disk or first or comment or here != count:
        raise ValueError("the file does not end as one")
    end = tail
    if tail >= _LOCATOR.size:
        sign, disk, at, disks = _LOCATOR.unpack(_read(file, tail - _LOCATOR.size, _LOCATOR.size))
        if sign == b"PK\6\7":
            end = tail - _LOCATOR.size - _END64.size
            if disk or disks != 1 or at != end:
                raise ValueError("the end of the directory is not where it is said to be")
            wide = _END64.unpack(_read(file, at, _END64.size))
            if wide[:2] != (b"PK\6\6", _END64.size - 12) or wide[4:6] != (0, 0) or wide[6] != wide[7]:
                raise ValueError("the end of the directory is damaged")
            narrow = ((count, _MAX16), (length, _MAX32), (begin, _MAX32))
            if any(short not in (long, limit) for (short, limit), long in zip(narrow, wide[7:], strict=True)):
                raise ValueError("the two ends of the directory contradict each other")
            count, length, begin = wide[7:]
    if count > _MOST_MEMBERS:
        raise ValueError(f"{count} members are more than a state has")
    if begin + length != end or count * _ENTRY.size > length:
        raise ValueError("the directory does not fit the file")
    return count, begin, end


def _entry(file: BinaryIO, directory: bytes, at: int, limit: int) -> tuple[str, Member, int]:
    """An entry of the directory, compared with what lies before its member; and where the next entry begins."""
    fields = _ENTRY.unpack_from(directory, at)
    sign, _, _, flags, method, _, _, crc, packed, size, n_name, n_extra, n_comment, disk, _, _, begin = fields
    at += _ENTRY.size
    raw_name, extra = directory[at : at + n_name], directory[at + n_name : at + n_name + n_extra]
    name = raw_name.decode()
    if sign != b"PK\1\2" or disk or n_comment or len(extra) != n_extra:
        raise ValueError("an entry of the directory is damaged")
    if flags & ~_FLAGS or method:
        raise ValueError(f"the member {shown(name)} is compressed or encrypted")
    size, packed, begin = _widened(extra, size, packed, begin)
    if size != packed or begin + _LOCAL.size > limit:
        raise ValueError(f"the member {shown(name)} does not fit the file")
    sign, _, flags_, method_, _, _, _, _, _, n_name_, n_extra_ = _LOCAL.unpack(_read(file, begin, _LOCAL.size))
    begin += _LOCAL.size
    if (sign, flags_, method_, n_name_) != (b"PK\3\4", flags, method, n_name) or _read(file, begin, n_name) != raw_name:
        raise ValueError(f"the member {shown(name)} contradicts the directory")
    begin += n_name + n_extra_
    if begin + size > limit:
        raise ValueError(f"the member {shown(name)} does not fit the file")
    return name, Member(begin, size, crc), at + n_name + n_extra


def _widened(extra: bytes, *values: int) -> list[int]:
    """Sizes and place, taken from the extra field where 32 bits do not hold them."""
    wide = [value == _MAX32 for value in values]
    if not extra and not any(wide):
        return list(values)
    if extra[:4] != struct.pack("<2H", 1, 8 * sum(wide)) or len(extra) != 4 + 8 * sum(wide):
        raise ValueError("an entry of the directory has extra fields that say nothing here")
    longer = iter(struct.unpack(f"<{sum(wide)}Q", extra[4:]))
    return [next(longer) if is_wide else value for is_wide, value in zip(wide, values, strict=True)]


def _read(file: BinaryIO, begin: int, size: int) -> bytes:
    file.seek(begin)
    data = file.read(size)
    if len(data) != size:
        raise ValueError("the file ends too early")
    return data
