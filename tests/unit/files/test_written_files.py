"""Files that are written under random names, never through links, and never in place of devices."""

import os
import sys
from pathlib import Path

import pytest

from megatron_packed.files import written_files
from megatron_packed.files.written_files import (
    open_new,
    open_temporary,
    remove_abandoned,
    replacing,
    resolve_output,
    temporary_path,
    write_file,
)


def test_a_link_at_the_name_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, page = tmp_path / "victim", tmp_path / "page"
    victim.write_text("precious")
    page.symlink_to(victim)
    write_file(page, b"new", durable=True)
    assert victim.read_text() == "precious"
    assert page.read_text() == "new" and not page.is_symlink()


def test_a_link_at_the_temporary_name_is_an_error(tmp_path: Path, monkeypatch) -> None:
    victim, planted = tmp_path / "victim", tmp_path / "planted"
    victim.write_text("precious")
    planted.symlink_to(victim)
    monkeypatch.setattr(written_files, "temporary_path", lambda path: planted)
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "page", b"new")
    assert victim.read_text() == "precious" and not (tmp_path / "page").exists()


def test_temporary_names_cannot_be_guessed_and_are_short_enough(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    assert temporary_path(path) != temporary_path(path)
    write_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_an_error_keeps_the_previous_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["page"]


def test_a_new_file_takes_no_name_that_exists(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    with pytest.raises(FileExistsError):
        open_new(tmp_path / "dangling")
    assert not (tmp_path / "absent").exists()


def test_a_users_link_leads_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "log").symlink_to("other/log")  # the file does not exist yet
    assert resolve_output(tmp_path / "log") == tmp_path / "other" / "log"


def test_devices_and_streams_are_refused(tmp_path: Path) -> None:
    """A rename onto /dev/stdout would remove it from the machine, also through a link."""
    through = tmp_path / "null"
    through.symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/stdout", "/dev/fd/9", "/proc/self/fd/1", through, tmp_path / "pipe"):
        with pytest.raises(OSError, match="names a device, a pipe or a standard stream"):
            resolve_output(path)
    assert resolve_output("/dev/shm/log") == Path("/dev/shm/log")


def test_the_file_of_standard_output_is_refused(tmp_path: Path, capfd) -> None:
    with capfd.disabled(), open(tmp_path / "run.out", "w") as file:
        kept = os.dup(1)
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        try:
            with pytest.raises(OSError, match="standard stream"):
                resolve_output(tmp_path / "run.out")
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def test_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("log")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        resolve_output(tmp_path / "log")


@pytest.mark.parametrize("locks", [True, False])
def test_only_temporary_files_of_ended_processes_are_removed(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is open stays; without locks, a file stays for a day."""
    page = tmp_path / "page[1].txt"
    left, open_one, other = (temporary_path(path) for path in (page, page, tmp_path / "other.txt"))
    for path in (left, other):
        os.close(open_temporary(path))
    descriptor = open_temporary(open_one)
    planted = temporary_path(page)
    planted.symlink_to(other)
    if not locks:
        monkeypatch.setattr(written_files.fcntl, "flock", no_locks)
        remove_abandoned(page)
        assert left.exists()
        os.utime(left, (0, 0))
    remove_abandoned(page)
    assert {path.name for path in tmp_path.iterdir()} == {open_one.name, other.name, planted.name}
    os.close(descriptor)


def no_locks(*_: object) -> None:
    raise OSError(38, "Function not implemented")
