"""The file in which the verdicts of a device are kept, and whom it trusts.

JSON in the cache folder, written whole or not at all. The folder is opened once and its
files are addressed by that descriptor, so that it cannot be exchanged meanwhile. A
folder or file that is a symbolic link, of another kind, another user's, or writable by
others is neither read nor written: the rules of csrc/host/files.h, which has the files
of breakers and is not Python's to call.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from typing import Any

KEPT_S = 24 * 3600.0  # verdicts that are not all good
_LARGEST = 1 << 20  # bytes of a file
_PREFIX = "selftest-"
_LOCK = _PREFIX + "lock"
# One name for all, since the lock admits one writer: what a killed one left is in the
# way of the next, which removes it.
_NEW = _PREFIX + "replacement.tmp"


class Untrusted(OSError):
    """A folder or file that others may write, or that cannot be used."""


def _check(path: str, descriptor: int, kind: int) -> os.stat_result:
    facts = os.fstat(descriptor)
    if stat.S_IFMT(facts.st_mode) != kind:
        what = "folder" if kind == stat.S_IFDIR else "regular file"
        raise Untrusted(f"{path}: expected a {what}, found mode {facts.st_mode:o}")
    if facts.st_uid != os.geteuid():
        raise Untrusted(f"{path}: expected to be its owner, found user {facts.st_uid}")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(facts.st_mode)
        raise Untrusted(
            f"{path}: expected no one else to write it, found mode {mode:o}"
        )
    return facts


@contextlib.contextmanager
def _as_untrusted(path: str) -> Iterator[None]:
    """What the system refuses, with the path it is about."""
    try:
        yield
    except Untrusted:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.ELOOP:
            reason = "expected no symbolic link"
        raise Untrusted(f"{path}: {reason}") from error


def _make_folder(folder: str) -> None:
    parent = os.path.dirname(folder)
    if parent != folder and not os.path.isdir(parent):
        _make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """The folder's descriptor.

    Raises:
        FileNotFoundError: there is none.
        Untrusted: it is not to be used.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(path, flags)
    except NotADirectoryError:
        raise Untrusted(
            f"{path}: expected a folder, found a file or symbolic link"
        ) from None
    try:
        _check(path, folder, stat.S_IFDIR)
        yield folder
    finally:
        os.close(folder)


class Store:
    """The file of one device, in a folder that is open; made by opened()."""

    def __init__(self, path: str, folder: int, locked: bool, identity: str) -> None:
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._name = f"{_PREFIX}{digest}.json"
        self.path = os.path.join(path, self._name)
        self._folder, self._locked, self._device = folder, locked, identity

    def read(self, code_hash: str) -> tuple[dict[str, Any], float] | None:
        """The content and its age in seconds; None if there is none of this code.

        Raises:
            Untrusted, ValueError: it is not to be used; it is malformed.
        """
        # O_NONBLOCK: a pipe of that name must not stop us.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with _as_untrusted(self.path):
            try:
                descriptor = os.open(self._name, flags, dir_fd=self._folder)
            except FileNotFoundError:
                return None
            try:
                facts = _check(self.path, descriptor, stat.S_IFREG)
                data = _read(descriptor)
            finally:
                os.close(descriptor)
        if len(data) > _LARGEST:
            raise ValueError(f"expected at most {_LARGEST} bytes")
        try:
            content = json.loads(data)
        except RecursionError as error:
            raise ValueError("nested too deep") from error
        if not isinstance(content, dict):
            raise ValueError("expected an object")
        if (content.get("device"), content.get("code_hash")) != (
            self._device,
            code_hash,
        ):
            return None
        return content, time.time() - facts.st_mtime

    def set_aside(self) -> None:
        """Renames the file to *.bad, over an earlier one, if the lock is ours."""
        if not self._locked:
            return
        with contextlib.suppress(OSError):
            _rename(self._folder, self._name, self._name + ".bad")

    def write(self, code_hash: str, content: dict[str, Any]) -> None:
        """Replaces the file by one with this content, if the lock is ours.

        Raises:
            Untrusted: the folder cannot be written.
        """
        if not self._locked:
            return
        content = {"device": self._device, "code_hash": code_hash, **content}
        data = json.dumps(content, indent=1).encode()
        with _as_untrusted(self.path):
            _remove(self._folder, _NEW)
            try:
                _write(self._folder, _NEW, data)
                _rename(self._folder, _NEW, self._name)
            finally:
                _remove(self._folder, _NEW)


def _read(descriptor: int) -> bytes:
    """The content, and a byte more if it is too large."""
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(_LARGEST + 1)


def _write(folder: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(data)
        file.flush()
        # Before the rename: else a power failure may leave an empty file under the
        # good name.
        os.fsync(file.fileno())


def _rename(folder: int, name: str, to: str) -> None:
    """A name that was changed is on the disk only when its folder is."""
    os.rename(name, to, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def _remove(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def opened(folder: str, device_identity: str, wait_s: float) -> Iterator[Store]:
    """The store, for one process at a time, in a folder that is made if need be.

    One that has waited wait_s gets it all the same, and may read but not write.

    Raises:
        Untrusted: the folder is not to be used.
    """
    path = os.path.abspath(folder)
    with contextlib.ExitStack() as stack:
        with _as_untrusted(path):
            _make_folder(path)
            descriptor = stack.enter_context(_opened(path))
        lock_path = os.path.join(path, _LOCK)
        with _as_untrusted(lock_path):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(_LOCK, flags | os.O_NONBLOCK, 0o600, dir_fd=descriptor)
            stack.callback(os.close, lock)
            _check(lock_path, lock, stat.S_IFREG)
            locked = _wait(lock, wait_s)
        yield Store(path, descriptor, locked, device_identity)


def _wait(lock: int, wait_s: float) -> bool:
    """Whether the lock is ours; False after wait_s."""
    until = time.monotonic() + wait_s
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)


def forget(folder: str) -> int:
    """Removes all kept verdicts of a folder; how many there were.

    What has one of our names and is no file, such as a folder, is renamed to *.bad.

    Raises:
        Untrusted: the folder is not to be used.
    """
    path, count = os.path.abspath(folder), 0
    with _as_untrusted(path), contextlib.suppress(FileNotFoundError):
        with _opened(path) as descriptor:
            for name in os.listdir(descriptor):
                if name.startswith(_PREFIX) and not name.endswith(".bad"):
                    with contextlib.suppress(FileNotFoundError):  # it has just gone
                        count += _forget_one(descriptor, name)
    return count


def _forget_one(folder: int, name: str) -> bool:
    """Whether it was a verdict."""
    facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    verdict = name.endswith(".json")
    if stat.S_ISDIR(facts.st_mode):
        _rename_folder(folder, name, name + ".bad")
    elif verdict or not stat.S_ISREG(facts.st_mode):
        _remove(folder, name)
    return verdict


def _rename_folder(folder: int, name: str, to: str) -> None:
    """Over a file, too, which rename(2) refuses."""
    try:
        _rename(folder, name, to)
    except NotADirectoryError:
        _remove(folder, to)
        _rename(folder, name, to)
