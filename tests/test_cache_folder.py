"""The cache folder: found where it can be, used where it is ours alone, and never a reason to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import carpool
from carpool import cache

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
SOURCE = Path(carpool.__file__).parents[1]


@pytest.fixture(autouse=True)
def said_nothing_yet() -> None:
    cache._say_once.cache_clear()


def test_the_folder_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CARPOOL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache.folder() == tmp_path / "x" / "carpool"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "carpool"


def test_what_is_kept_is_there_and_for_this_user_alone(untried: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CARPOOL_CACHE", str(untried / "own"))
    assert cache.read("a/b") is None
    assert cache.keep("a/b", b"1")
    assert cache.read("a/b") == b"1"
    assert [(untried / "own" / name).stat().st_mode & 0o777 for name in ("", "a")] == [0o700, 0o700]


def test_a_folder_that_others_may_write_is_not_used_and_that_is_said_once(untried: Path):
    """What another user puts into a shared cache is not read, and nothing of ours is put there."""
    (untried / "trials.json").write_text('{"a": 1}')
    untried.chmod(0o777)
    with pytest.warns(UserWarning, match="is not used: others may write into it; set CARPOOL_CACHE"):
        assert cache.read_json("trials.json") == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache.keep("b", b"")
    assert os.listdir(untried) == ["trials.json"]


@AS_ROOT
def test_a_folder_of_another_user_is_not_used(untried: Path):
    os.chown(untried, 12345, 12345)
    with pytest.warns(UserWarning, match="is not used: it belongs to another user"):
        assert not cache.keep("b", b"")
    assert os.listdir(untried) == []


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_a_missing_home_is_said_once_and_nothing_is_kept(home: str | None, monkeypatch: pytest.MonkeyPatch):
    """A missing HOME, of a user without a name."""
    for name in ("CARPOOL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is None:
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        monkeypatch.setenv("HOME", home)
    with pytest.warns(UserWarning, match="no home folder; set CARPOOL_CACHE"):
        assert cache.read("a") is None
    assert not cache.keep("a", b"")


NAMELESS = """
import os
import torch, carpool
from carpool import recall
from carpool.adapters.torch import compiler
from carpool.planning.trials import Trial

def train():
    x = torch.zeros(4, 2)
    jobs = [carpool.Job(lambda: torch.nn.Linear(2, 1), (x, x[:, :1]), loss=torch.nn.functional.mse_loss,
                        optimizer=lambda p: torch.optim.SGD(p, 0.1), name=str(i)) for i in range(2)]
    return [result.outcome.name for result in carpool.train(jobs, device="cpu", reporters=[])]

train()  # root may read what is imported late
os.setgid(12345), os.setuid(12345)
for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "CARPOOL_CACHE",
             "TORCHINDUCTOR_CACHE_DIR"):
    os.environ.pop(name, None)
recall.remember("a", Trial(2, 1.0, 1.0))
print(recall.remembered("a"), compiler._inductor_folder().name, *train())
"""


@AS_ROOT
def test_a_user_without_a_name_and_a_home_trains(tmp_path: Path):
    """An unknown user without HOME: a run goes on, and says once what to do."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", NAMELESS]
    ran = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "None torchinductor_uid_12345 COMPLETED COMPLETED\n"
    assert ran.stderr.count("there is no home folder; set CARPOOL_CACHE") == 1


FULL = """
import resource, signal
from carpool import cache, recall
from carpool.planning.trials import Trial
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
print(cache.keep("compiled/x", b"x" * 1000))
for name in range(20):
    recall.remember(str(name), Trial(2, 1.0, 1.0))
print(recall.remembered("0"))
"""


def test_a_full_disk_leaves_nothing_behind(untried: Path):
    """A full cache disk: no temporary file stays, and what was kept can be read."""
    ran = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("False\na step of 2 together")
    assert sorted(str(path.relative_to(untried)) for path in untried.rglob("*")) == [
        "compiled",
        "trials.json",
    ]
    assert json.loads((untried / "trials.json").read_text())


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"a"', "[" * 100_000, '{"a": NaN', b"\xff\xfe"])
def test_json_that_says_something_else_is_an_empty_object(untried: Path, text: str | bytes):
    (untried / "x.json").write_bytes(text.encode() if isinstance(text, str) else text)
    assert cache.read_json("x.json") == {}
