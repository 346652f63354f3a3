"""The terms of scripts, from what was asked for, a device and an environment."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from carpool import environment
from carpool.errors import OptionError
from carpool.executors.terms import Wanted, found_device, make_terms, with_folder, with_service
from carpool.memory import device
from carpool.memory.device import DeviceMemory
from carpool.process.mps import Service

GIB = 1 << 30
GPU = DeviceMemory("H200", 80 * GIB, 60 * GIB)


def test_a_cap_on_a_gpu_is_held_by_the_frameworks():
    terms = make_terms(Wanted(memory="20GiB", jobs=3), GPU, True, {"HOME": "/h"})
    assert (terms.cap_bytes, terms.capacity_bytes, terms.jobs) == (20 * GIB, 60 * GIB, 3)
    assert not terms.is_host_memory
    assert terms.environment["HOME"] == "/h"
    assert terms.environment["PYTHONUNBUFFERED"] == "1"
    assert terms.environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.237500"  # a GiB is the context's
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in terms.environment


def test_a_cap_on_the_host_is_held_by_us():
    terms = make_terms(Wanted(memory="25%"), GPU, False, {})
    assert terms.is_host_memory
    assert terms.cap_bytes == 20 * GIB
    assert (
        make_terms(Wanted(memory="1GiB"), GPU, False, {}).environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
        is None
    )


def test_without_a_cap_scripts_grow_unless_the_user_said_otherwise():
    theirs = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    terms = make_terms(Wanted(), GPU, True, theirs)
    assert terms.cap_bytes == 0
    assert terms.jobs == environment.cores()
    assert terms.environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert terms.environment["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    capped = make_terms(Wanted(memory="1GiB"), GPU, True, theirs)
    assert capped.environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_a_cap_that_never_fits_is_refused():
    with pytest.raises(OptionError, match=r"within the 60.0 GiB that are free on H200.+Received: 61GiB"):
        make_terms(Wanted(memory="61GiB"), GPU, True, {})


def test_a_share_is_a_percentage_for_mps():
    terms = make_terms(Wanted(share=0.25), GPU, True, {})
    assert terms.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    with pytest.raises(OptionError, match="a share above 0"):
        make_terms(Wanted(share=1.5), GPU, True, {})


def test_clients_find_their_service():
    terms = make_terms(Wanted(), GPU, True, {})
    served = with_service(terms, Service(True, "", {"CUDA_MPS_PIPE_DIRECTORY": "/p"}))
    assert served.environment["CUDA_MPS_PIPE_DIRECTORY"] == "/p"
    assert served == replace(terms, environment={**terms.environment, "CUDA_MPS_PIPE_DIRECTORY": "/p"})


def test_a_folder_of_our_own_is_always_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    terms = make_terms(Wanted(), GPU, True, {})
    assert terms.logs.parent == Path("carpool-logs")
    folders = [with_folder(terms, Wanted()).logs for _ in range(3)]
    assert [folder.is_dir() for folder in folders] == [True] * 3
    assert len(set(folders)) == 3


def test_a_folder_of_the_users_may_be_there(tmp_path: Path):
    wanted = Wanted(logs=tmp_path / "a" / "b")
    terms = make_terms(wanted, GPU, True, {})
    assert with_folder(terms, wanted).logs == with_folder(terms, wanted).logs == tmp_path / "a" / "b"
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="a folder for --logs"):
        with_folder(terms, Wanted(logs=tmp_path / "file"))


def test_folders_that_are_made_are_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for wanted in (Wanted(), Wanted(logs=tmp_path / "a" / "b")):
        logs = with_folder(make_terms(wanted, GPU, True, {}), wanted).logs
        assert logs.stat().st_mode & 0o777 == 0o700
    (tmp_path / "carpool-logs").chmod(0o777)
    with pytest.raises(OptionError, match="carpool-logs: others may write into it"):
        with_folder(make_terms(Wanted(), GPU, True, {}), Wanted())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes what belongs to somebody else")
def test_another_users_link_is_no_folder_for_logs(tmp_path: Path):
    """Logs do not go where another user's link leads."""
    (tmp_path / "theirs").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "theirs")
    for logs in (link, link / "below"):
        wanted = Wanted(logs=logs)
        assert with_folder(make_terms(wanted, GPU, True, {}), wanted).logs == logs
    os.chown(link, 12345, 12345, follow_symlinks=False)
    for logs in (link, link / "below"):
        wanted = Wanted(logs=logs)
        with pytest.raises(OptionError, match="is a link of another user"):
            with_folder(make_terms(wanted, GPU, True, {}), wanted)


def test_a_hidden_gpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "gpus", lambda: (GPU,))
    monkeypatch.setattr(device, "read", lambda name: replace(GPU, name=name))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert found_device() == (replace(GPU, name="cuda"), True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found_device() == (replace(GPU, name="cpu"), False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3f2a")
    assert found_device() == (replace(GPU, name="cuda"), True)
    monkeypatch.setattr(device, "gpus", lambda: ())
    assert found_device() == (replace(GPU, name="cpu"), False)
