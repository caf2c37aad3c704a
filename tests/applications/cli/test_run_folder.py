import os
from dataclasses import replace
from pathlib import Path

import pytest

from dpshard.applications.cli import plots
from dpshard.applications.cli.run_folder import RunFolder, write_atomically
from dpshard.applications.cli.settings import TrainSettings
from dpshard.applications.cli.training import _Unchanged
from dpshard.errors import CheckpointError, RunFolderError


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", TrainSettings())


def test_a_folder_opens_with_the_settings_it_was_made_with(folder):
    assert RunFolder.open(folder.path).settings() == TrainSettings()


def test_a_folder_that_is_taken_is_refused(folder):
    with pytest.raises(RunFolderError, match="--resume"):
        RunFolder.create(folder.path, TrainSettings())


@pytest.mark.parametrize("below", ["file", "file/run"])
def test_an_unwritable_place_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="file"):
        RunFolder.create(tmp_path / below, TrainSettings())


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match=r"config\.yaml"):
        RunFolder.open(tmp_path)


def test_two_processes_cannot_train_in_one_folder(folder):
    with folder.locked(), pytest.raises(RunFolderError, match="Another process"), folder.locked():
        pass


def test_metrics_are_cut_back_to_the_checkpoint_and_to_whole_lines(folder):
    with folder.append_metrics(after_step=0) as append:
        for step in (1, 2, 3):
            append({"step": step, "loss": float("nan")})
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    with folder.append_metrics(after_step=2) as append:
        append({"step": 3, "loss": 1.0})
    assert folder.read_metrics() == [
        {"step": 1, "loss": None},
        {"step": 2, "loss": None},
        {"step": 3, "loss": 1.0},
    ]


@pytest.mark.parametrize("damage", [b"garbage\n", b'{"step": 0}\n', b"\xff\xfe\n", b"", None], ids=str)
def test_damaged_or_missing_metrics_do_not_block_a_resume(folder, damage):
    with folder.append_metrics(after_step=0) as append:
        for step in (1, 2):
            append({"step": step})
    if damage is None:
        folder.metrics.unlink()
    else:
        lines = folder.metrics.read_bytes().splitlines(keepends=True)
        folder.metrics.write_bytes(damage + lines[1])
    with (
        pytest.warns(UserWarning, match=r"metrics.jsonl is missing or damaged: \d of .* after 2 steps"),
        folder.append_metrics(after_step=2) as append,
    ):
        append({"step": 3})
    kept = [] if damage is None else [{"step": 2}]
    assert folder.read_metrics() == [*kept, {"step": 3}]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"the disk is full, .* bytes are free"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"5\n", b'{"loss": 1}\n', b'{"step": 0}\n', b"\xff\n", b"{\n"])
def test_metrics_that_no_run_has_written_are_refused(tmp_path, content):
    folder = RunFolder.create(tmp_path / "run", TrainSettings())
    folder.metrics.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"metrics.jsonl was damaged or edited .*: restore it"):
        folder.read_metrics()


def test_two_processes_that_write_one_file_do_not_meet(tmp_path, monkeypatch):
    """Each writes beside the file under a name of its own, so neither renames what the other is writing."""
    path, names, replace = tmp_path / "file", [], Path.replace

    def renamed(beside, target):
        names.append(beside.name)
        return replace(beside, target)

    monkeypatch.setattr(Path, "replace", renamed)
    for process in (11, 12):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        write_atomically(path, b"new")
    assert len(set(names)) == 2


def mode(path):
    return path.stat().st_mode & 0o777


def test_only_the_user_reads_what_epsilon_does_not_cover(folder, pictures):
    with folder.append_metrics(after_step=0) as append:
        append({"step": 1, "loss": 1.0})
    write_atomically(folder.report, b"scores")
    assert mode(folder.path) == mode(folder.plots) == mode(folder.checkpoints) == 0o700
    assert mode(folder.metrics) == mode(folder.report) == 0o600
    pictures = plots.draw(folder)
    assert pictures
    assert {mode(path) for path in pictures} == {0o600}


def test_settings_of_an_earlier_version_are_those_of_now_with_the_defaults_of_what_came_later(folder):
    unchanged = _Unchanged(folder, TrainSettings())
    saved = {name: value for name, value in unchanged.state_dict().items() if name != "buffers"}
    unchanged.load_state_dict(saved)
    with pytest.raises(CheckpointError, match="buffers"):
        _Unchanged(folder, replace(TrainSettings(), buffers=True)).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="of_the_future"):
        unchanged.load_state_dict(saved | {"of_the_future": 1})
