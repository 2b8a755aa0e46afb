"""``flash-attn-rocm breaker``: what it lists and closes, and its exit codes.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import os
import time

import pytest
from helpers.commands import command

from flash_attn_rocm import _C
from flash_attn_rocm._commands import breaker, main


class Extension:
    """The functions of _C over a dictionary: folder -> rows."""

    Error = _C.Error

    def __init__(self):
        self.rows, self.bad, self.untrusted = {}, {}, set()

    def _trusted(self, folder):
        if folder in self.untrusted:
            raise self.Error(f"{folder}: not to be trusted")

    def store_list(self, folder):
        self._trusted(folder)
        return self.rows.get(folder, []), self.bad.get(folder, 0)

    def store_reset(self, folder, kernel=None):
        self._trusted(folder)
        before = self.rows.get(folder, [])
        self.rows[folder] = [r for r in before if kernel not in (None, r[1])]
        if kernel is None:
            self.bad.pop(folder, None)
        return len(before) - len(self.rows[folder])


@pytest.fixture
def extension(monkeypatch):
    made = Extension()
    monkeypatch.setattr(breaker, "_extension", lambda: made)
    return made


@pytest.fixture
def call(capsys, tmp_path):
    """call(*words) -> (code, out, err), for the folder tmp_path."""
    return lambda *words: command(main, capsys, "breaker", *words, "--dir", tmp_path)


def row(kernel="fa_fwd_f16_d64_plain", retry_in=60, failures=2):
    now = int(time.time())
    return "gfx906 driver 1", kernel, 7, failures, now, now + retry_in, "no answer"


def test_without_a_folder_there_is_one_line(extension, capsys):
    code, out, err = command(main, capsys, "breaker", "list", "--dir", "")
    assert (code, out, err.count("\n")) == (2, "", 1) and "--dir: expected" in err


def test_an_empty_folder_has_nothing_open(extension, call, tmp_path):
    assert call("list") == (0, f"{tmp_path}: no breaker is open\n", "")


def test_list_says_what_is_open_of_devices_and_of_the_simulator(
    extension, call, tmp_path
):
    extension.rows[str(tmp_path)] = [row()]
    extension.rows[str(tmp_path / "sim")] = [row("fa_bwd_q_f32_d64_plain", -5, 1)]
    code, out, err = call("list")
    assert (code, err) == (1, "")
    first, second = out.splitlines()
    assert first.startswith(
        "fa_fwd_f16_d64_plain: open on gfx906 driver 1, failed 2 times in a row, last "
    )
    assert first.endswith(": no answer")
    assert second.startswith("fa_bwd_q_f32_d64_plain: half_open on ")
    assert "failed 1 time, last" in second


def test_list_as_json_has_every_field(extension, call, tmp_path):
    extension.rows[str(tmp_path)] = [made := row()]
    code, out, _ = call("list", "--json")
    assert code == 1
    names = ("device", "kernel", "code_hash", "failures", "opened", "retry", "cause")
    entry = {"folder": str(tmp_path), "state": "open", **dict(zip(names, made))}
    assert json.loads(out) == {"breakers": [entry], "unreadable_files": 0}


def test_reset_closes_all_or_one(extension, call, tmp_path):
    names = ("a", "b", "c")
    extension.rows[str(tmp_path)] = [row(name) for name in names]
    extension.rows[str(tmp_path / "sim")] = [row("a")]
    assert call("reset", "a") == (0, f"{tmp_path}: closed 2\n", "")
    assert [r[1] for r in extension.rows[str(tmp_path)]] == ["b", "c"]
    assert call("reset") == (0, f"{tmp_path}: closed 2\n", "")
    assert call("list")[0] == 0


def test_reset_of_all_forgets_what_the_self_test_found(extension, call, tmp_path):
    kept, other = tmp_path / "selftest-12.json", tmp_path / "notes.json"
    for file in (kept, other):
        file.write_text("{}")
    call("reset", "a")
    assert kept.exists()
    call("reset")
    assert not kept.exists() and other.exists()


def test_damaged_files_are_exit_code_2_until_reset(extension, call, tmp_path):
    extension.bad[str(tmp_path)] = 1
    code, out, err = call("list")
    assert (code, out, err.count("\n")) == (2, "", 1) and "damaged" in err
    assert call("reset")[0] == 0
    assert call("list")[0] == 0


@pytest.mark.parametrize("action", ["list", "reset"])
def test_a_folder_that_is_not_trusted_is_one_line_and_exit_code_2(
    extension, call, tmp_path, action
):
    extension.untrusted.add(str(tmp_path))
    assert call(action) == (
        *(2, ""),
        f"flash-attn-rocm: {tmp_path}: not to be trusted\n",
    )


@pytest.mark.parametrize(
    "words",
    [[], ["close"], ["list", "kernel"], ["reset", "a b"], ["reset", "../x"]],
    ids=str,
)
def test_bad_usage_gives_one_line_and_exit_code_2(extension, capsys, words):
    code, out, err = command(main, capsys, "breaker", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_reset_goes_on_behind_a_folder_that_is_not_trusted(extension, call, tmp_path):
    extension.untrusted.add(str(tmp_path))
    extension.rows[str(tmp_path / "sim")] = [row()]
    code, out, err = call("reset")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert extension.rows[str(tmp_path / "sim")] == []


def huge(path):
    path.touch()
    os.truncate(path, 1 << 40)


def writable(path):
    path.touch()
    path.chmod(0o606)


def folder_with_files(path):
    path.mkdir()
    (path / "file").touch()


# What may lie under a name of ours, by what made it.
THINGS = {
    "folder": os.mkdir,
    "folder with files": folder_with_files,
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "empty file": lambda path: path.touch(),
    "huge file": huge,
    "file of all": writable,
}
FILE, LOCK = "breakers-0123456789abcdef.txt", "breakers.lock"


@pytest.mark.parametrize("thing", THINGS)
def test_whatever_lies_there_is_one_line_that_names_it(call, tmp_path, thing):
    THINGS[thing](tmp_path / FILE)
    code, out, err = call("list")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path}: 1 damaged file" in err


@pytest.mark.parametrize("thing", sorted({*THINGS} - {"file of all"}))
@pytest.mark.parametrize("earlier", [None, "link", "empty file"])
def test_reset_puts_whatever_lies_there_aside(call, tmp_path, thing, earlier):
    THINGS[thing](tmp_path / FILE)
    if earlier is not None:
        THINGS[earlier](tmp_path / f"{FILE}.bad")
    kind = (tmp_path / FILE).lstat().st_mode
    assert call("reset") == (0, f"{tmp_path}: closed 0\n", "")
    assert call("list") == (0, f"{tmp_path}: no breaker is open\n", "")
    assert (tmp_path / f"{FILE}.bad").lstat().st_mode == kind


def test_a_full_folder_in_the_way_of_setting_aside_is_one_line(call, tmp_path):
    THINGS["empty file"](tmp_path / FILE)
    THINGS["folder with files"](tmp_path / f"{FILE}.bad")
    code, out, err = call("reset")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(tmp_path) in err and FILE in err and "set it aside" in err


@pytest.mark.parametrize("thing", sorted({*THINGS} - {"empty file", "huge file"}))
def test_what_lies_in_place_of_the_lock_is_one_line_that_names_it(
    call, tmp_path, thing
):
    THINGS[thing](tmp_path / LOCK)
    assert call("list")[0] == 0
    code, out, err = call("reset")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(tmp_path) in err and LOCK in err


@pytest.mark.parametrize("thing", sorted({*THINGS} - {"folder", "folder with files"}))
@pytest.mark.parametrize("action", ["list", "reset"])
def test_what_lies_in_place_of_the_folder_is_one_line(capsys, tmp_path, thing, action):
    cache = tmp_path / "cache"
    THINGS[thing](cache)
    code, out, err = command(main, capsys, "breaker", action, "--dir", cache)
    assert (code, out, err.count("\n")) == (2, "", 1) and str(cache) in err


def test_the_extensions_own_files_are_listed_and_repaired(call, tmp_path):
    tmp_path.chmod(0o700)
    assert call("list")[0] == 0
    bad = tmp_path / "breakers-0123456789abcdef.txt"
    bad.write_text("junk\n")
    assert call("list")[0] == 2
    assert call("reset")[0] == 0 and not bad.exists()
    assert call("list")[0] == 0
    tmp_path.chmod(0o777)
    assert call("list")[0] == 2
