"""Folders of ours alone, and files that are there whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from carpool import private

OTHER = 12345  # a user without a name
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes what belongs to somebody else")


def test_a_folder_of_ours_is_for_this_user_alone(tmp_path: Path):
    private.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert private.fault(tmp_path / "a" / "b") is None
    private.make_folder(tmp_path / "a" / "b")  # one that is there is left as it is


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_is_found_out(tmp_path: Path, mode: int):
    tmp_path.chmod(mode)
    assert private.fault(tmp_path) == "others may write into it"


@AS_ROOT
def test_a_folder_of_another_user_is_found_out(tmp_path: Path):
    os.chown(tmp_path, OTHER, OTHER)
    assert private.fault(tmp_path) == "it belongs to another user"


@AS_ROOT
def test_a_link_of_another_user_is_found_out_wherever_it_leads(tmp_path: Path):
    (tmp_path / "own").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "own")
    assert private.fault(link) is None, "one of our own is as good as what it leads to"
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    assert private.fault(link) == f"{link} is a link of another user"
    assert private.foreign_link(link / "below") == f"{link} is a link of another user"


def test_a_file_is_replaced_whole(tmp_path: Path):
    private.write_whole(tmp_path / "file", b"one")
    private.write_whole(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"]


FULL = """
import resource, signal, sys
from pathlib import Path
from carpool import private
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    private.write_whole(Path(sys.argv[1]), b"x" * 5000)
except OSError as error:
    print(type(error).__name__)
"""


def test_on_a_full_disk_the_file_stays_as_it_was_and_nothing_else_is_there(tmp_path: Path):
    """A full disk leaves no temporary file behind."""
    file = tmp_path / "file"
    private.write_whole(file, b"old")
    ran = subprocess.run([sys.executable, "-c", FULL, str(file)], capture_output=True, text=True, check=True)
    assert ran.stdout == "OSError\n"
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_nothing_is_written_through_a_link(tmp_path: Path):
    """A log is a new file: what a link of its name leads to stays as it was."""
    theirs, log = tmp_path / "theirs", tmp_path / "log"
    theirs.write_bytes(b"precious")
    log.symlink_to(theirs)
    with private.create(log) as file:
        file.write(b"ours")
    assert theirs.read_bytes() == b"precious"
    assert not log.is_symlink()
    assert log.read_bytes() == b"ours"
    with private.create(log) as file:
        file.write(b"again")
    assert log.read_bytes() == b"again"
