"""What other systems than Linux lack, taken away here: it works without, or says so."""

import errno
import json
import os
import subprocess
import sys

import pytest
from training_runs import RECIPES, arguments, losses

from hf_sigmoid import files, run_lock

# As on Windows, as far as a Linux system can be without.
LACKING = """
import json, os, signal, sys
import datasets, psutil  # have parts of their own for each system
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM"):
    delattr(signal, name)
opened = os.open
def opens_no_folder(path, *rest, **options):
    if isinstance(path, (str, os.PathLike)) and os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return opened(path, *rest, **options)
recipes, *argv = json.loads(sys.argv[1])
sys.path.insert(0, recipes)
from hf_sigmoid import files
from hf_sigmoid.training import train
from hf_sigmoid.training import script
import stability
import hf_sigmoid.evals.commands
files.os = type(sys)("os")
vars(files.os).update(vars(os) | {"open": opens_no_folder})
script.run(lambda: train.main(argv))
"""


def test_a_run_needs_nothing_that_only_posix_has(tiny, corpus_file, tmp_path):
    argv = arguments(tiny, corpus_file, tmp_path / "out", **{"train.steps": 4})
    run = subprocess.run(
        [sys.executable, "-c", LACKING, json.dumps([str(RECIPES), *argv])], capture_output=True,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert len(losses(tmp_path / "out")) == 4
    names = [folder.name for folder in (tmp_path / "out" / "checkpoints").iterdir()]
    assert names == ["step_00000003"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_no_reason_to_stop(tmp_path, monkeypatch, number):
    import fcntl

    def refuse(*given):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / run_lock.RunLock.FILE).touch()  # of a process that was killed
    run_lock.RunLock(tmp_path).release(remove=True)
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_flushes_no_folder_is_no_reason_to_stop(tmp_path, monkeypatch):
    flush = os.fsync

    def flush_files(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", flush_files)
    assert files.write_text(tmp_path / "a", "b").read_text() == "b"


def test_a_lock_that_cannot_be_written_is_no_missing_lock(tmp_path):
    (tmp_path / run_lock.RunLock.FILE).mkdir()
    with pytest.raises(OSError, match=r"\.lock"):
        run_lock.RunLock(tmp_path)


def test_healing_says_that_it_needs_linux(tmp_path):
    code = (
        "import pathlib, sys, heal_smollm2\n"
        "from hf_sigmoid.training import script\n"
        "exists = pathlib.Path.exists\n"
        "pathlib.Path.exists = lambda self: '/proc' not in str(self) and exists(self)\n"
        f"script.run(lambda: heal_smollm2.main(['--out', {str(tmp_path / 'out')!r}]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=RECIPES, timeout=120
    )
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("error: peak memory is read off /proc")
    assert not (tmp_path / "out").exists()
