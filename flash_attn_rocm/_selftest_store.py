"""The file in which the verdicts of a device are kept, and whom it trusts.

JSON in the cache folder, written whole or not at all. A folder or file that is a
symbolic link, another user's, or writable by others is neither read nor written.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from typing import Any

KEPT_S = 24 * 3600.0  # verdicts that are not all good
_LARGEST = 1 << 20  # bytes of a file
_PREFIX = "selftest-"


class Untrusted(OSError):
    """A folder or file that others may write, or that cannot be used."""


def _check(path: str, facts: os.stat_result) -> None:
    if stat.S_ISLNK(facts.st_mode):
        raise Untrusted(f"{path}: expected no symbolic link")
    if facts.st_uid != os.geteuid():
        raise Untrusted(f"{path}: expected to be its owner, found user {facts.st_uid}")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(facts.st_mode)
        raise Untrusted(
            f"{path}: expected no one else to write it, found mode {mode:o}"
        )


def _make_folder(folder: str) -> None:
    parent = os.path.dirname(folder)
    if parent != folder and not os.path.isdir(parent):
        _make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)


class Store:
    """The file of one device."""

    def __init__(self, folder: str, device_identity: str) -> None:
        digest = hashlib.sha256(device_identity.encode()).hexdigest()[:16]
        self._folder = os.path.abspath(folder)
        self._device = device_identity
        self.path = os.path.join(self._folder, f"{_PREFIX}{digest}.json")

    @contextlib.contextmanager
    def locked(self, wait_s: float) -> Iterator[None]:
        """One process at a time inside; one that waited wait_s goes in all the same.

        Raises:
            Untrusted: the folder is not to be used.
        """
        lock = os.path.join(self._folder, _PREFIX + "lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            _make_folder(self._folder)
            _check(self._folder, os.lstat(self._folder))
            descriptor = os.open(lock, flags, 0o600)
        except Untrusted:
            raise
        except OSError as error:
            raise Untrusted(f"{error.filename}: {error.strerror}") from error
        try:
            until = time.monotonic() + wait_s
            while time.monotonic() < until:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.1)
            yield
        finally:
            os.close(descriptor)

    def read(self, code_hash: str) -> tuple[dict[str, Any], float] | None:
        """The content and its age in seconds; None if there is none of this code.

        Raises:
            Untrusted, ValueError: it is not to be used; it is malformed.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:  # a symbolic link, too
            raise Untrusted(f"{self.path}: {error.strerror}") from error
        with open(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            _check(self.path, facts)
            data = file.read(_LARGEST + 1)
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
        """Renames the file to *.bad, over an earlier one."""
        with contextlib.suppress(OSError):
            os.replace(self.path, self.path + ".bad")

    def write(self, code_hash: str, content: dict[str, Any]) -> None:
        """Replaces the file by one with this content.

        Raises:
            Untrusted: the folder cannot be written.
        """
        content = {"device": self._device, "code_hash": code_hash, **content}
        new = None
        try:
            descriptor, new = tempfile.mkstemp(dir=self._folder, prefix=_PREFIX)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(descriptor)
            os.replace(new, self.path)
        except OSError as error:
            if new is not None:
                with contextlib.suppress(OSError):
                    os.unlink(new)
            raise Untrusted(f"{self.path}: {error.strerror}") from error


def forget(folder: str) -> int:
    """Removes all kept verdicts of a folder; how many there were."""
    try:
        _check(folder, os.lstat(folder))
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0
    kept = [n for n in names if n.startswith(_PREFIX) and n.endswith(".json")]
    for name in kept:
        os.unlink(os.path.join(folder, name))
    return len(kept)
