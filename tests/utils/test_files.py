"""Atomic writes: whole files under random names, with the permissions of the file they replace."""

import os
import secrets
import signal
import stat
import subprocess
import sys
import threading
import zlib

import pytest

from lkv.errors import DataError
from lkv.utils.files import (
    as_path,
    atomic_write,
    check_writable_file,
    check_writable_folder,
    strip_parent_dirs,
    write_text,
)  # fmt: skip


def write(path, text):
    write_text(path, text, DataError, "the text")


def test_folders_have_a_name_however_they_are_given(tmp_path, monkeypatch):
    (folder := tmp_path / "model").mkdir()
    monkeypatch.chdir(folder)
    names = [".", "../model/", f"{folder}/", "owner/model"]
    assert [strip_parent_dirs(name) for name in names] == ["model"] * 3 + ["owner/model"]


def test_two_writers_of_one_file_never_share_a_temporary_file(tmp_path):
    path = tmp_path / "a.txt"
    with atomic_write(path, DataError, "one") as first, atomic_write(path, DataError, "two") as second:
        assert first != second and first.parent == second.parent == tmp_path
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["a.txt"]


def test_planted_links_are_not_followed(tmp_path, monkeypatch):
    victim, path = tmp_path / "victim", tmp_path / "a.txt"
    victim.write_text("mine")
    # The names that earlier versions used could be predicted.
    thread = threading.get_native_id()
    (tmp_path / f".{zlib.crc32(b'a.txt'):08x}-{thread}.tmp").symlink_to(victim)
    (tmp_path / f".{thread}.tmp").symlink_to(victim)
    write(path, "text")
    check_writable_folder(tmp_path, DataError, "the text")
    assert victim.read_text() == "mine" and path.read_text() == "text"
    monkeypatch.setattr(secrets, "token_hex", lambda size: "planted")
    (tmp_path / f".{zlib.crc32(b'a.txt'):08x}-planted.tmp").symlink_to(victim)
    with pytest.raises(DataError, match=r"the text cannot be written to .*nothing was changed there"):
        write(path, "other")
    assert victim.read_text() == "mine" and path.read_text() == "text"


def test_what_killed_writes_left_is_deleted_by_the_next_write_of_the_same_file(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from lkv.errors import DataError\n"
        "from lkv.utils.files import atomic_write\n"
        "with atomic_write(Path(sys.argv[1]), DataError, 'the text'): os.kill(os.getpid(), 9)"
    )
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    for name in (path, other):
        assert subprocess.run([sys.executable, "-c", program, name], check=False).returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    write(path, "text")
    assert len(os.listdir(tmp_path)) == 3  # another process may still write it
    for file in tmp_path.glob(".*.tmp"):
        os.utime(file, (1, 1))
    with atomic_write(path, DataError, "the text") as temporary:
        assert len(os.listdir(tmp_path)) == 3 and path.read_text() == "text"
        temporary.write_text("new")
    assert len(list(tmp_path.glob(".*.tmp"))) == 1 and path.read_text() == "new"
    write(other, "other")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_permissions_are_those_of_the_replaced_file(tmp_path, mode):
    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(mode)
    write(path, "new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == mode
    (tmp_path / "plain").write_text("")
    write(tmp_path / "new.txt", "new")
    assert (tmp_path / "new.txt").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_content_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: events.append("fsync") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: events.append("replace") or replace(*paths))
    write(tmp_path / "a.txt", "text")
    assert events == ["fsync", "replace"]


def test_a_failed_block_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    write(path, "old")

    def fail():
        with atomic_write(path, DataError, "the text") as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("name", [3, None, b"a", "a\0b", "\ud800"])
def test_what_is_no_path_is_refused(name):
    with pytest.raises(DataError, match=r"the text is .*, but it must be a path"):
        as_path(name, DataError, "the text")


def test_places_that_cannot_be_written_to_are_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="the text cannot be written to"):
        check_writable_folder(tmp_path / "file" / "below", DataError, "the text")
    with pytest.raises(DataError, match="is a folder; give a file for the text"):
        check_writable_file(tmp_path, DataError, "the text")
    endless = tmp_path / ("a/" * 2000) / "a.txt"
    for attempt in (lambda: check_writable_file(endless, DataError, "the text"), lambda: write(endless, "text")):
        with pytest.raises(DataError, match=r"the text cannot be written to .*File name too long"):
            attempt()
    assert capsys.readouterr().err == ""
    for _ in range(2):
        check_writable_file(tmp_path / "new" / "deep" / "a.txt", DataError, "the text")
    assert os.listdir(tmp_path / "new" / "deep") == []
    assert capsys.readouterr().err == f"created the folder {tmp_path / 'new' / 'deep'}\n"


@pytest.mark.parametrize("through_link", [False, True])
def test_devices_and_pipes_are_not_replaced(tmp_path, through_link):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with pytest.raises(DataError, match="is a device or a pipe"):
        write_text(link if through_link else pipe, "text", DataError, "the text")
    assert pipe.is_fifo() and link.is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_a_file_that_is_deleted_meanwhile_is_no_device(tmp_path, monkeypatch):
    """By another process, as soon as this one has looked at it."""
    path, look = tmp_path / "a.txt", os.stat
    path.write_text("old")

    def look_and_delete(name, *args, **kwargs):
        status = look(name, *args, **kwargs)
        if name == path:
            path.unlink(missing_ok=True)
        return status

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", look_and_delete)
        write(path, "new")
    assert path.read_text() == "new"
