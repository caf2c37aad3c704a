"""The error for a full disk says so, with the free bytes."""

import errno
import os
import resource

import pytest

from dpshard.checkpoint.disk import why
from dpshard.errors import CheckpointError
from tests.checkpoint.test_checkpointer import Training

FULL = r"the disk is full, .* \([\d,]+ bytes are free there\)"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
    ],
    ids=["full", "quota", "torch"],
)
def test_a_full_disk_is_said(error, tmp_path):
    text = why(error, tmp_path / "not" / "there")
    assert "the disk is full" in text
    assert "bytes are free there" in text


def test_other_errors_say_what_they_are(tmp_path):
    assert why(PermissionError(errno.EACCES, "Permission denied"), tmp_path) == "Permission denied"
    assert "shape" in why(RuntimeError("shape mismatch"), tmp_path)


def saved(checkpoints, wait):
    checkpoints.save(wait=wait)
    checkpoints.wait()


@pytest.mark.parametrize("limit", [100, 3000])
@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
def test_a_checkpoint_that_finds_no_room_says_so(tmp_path, limit, wait):
    training = Training(tmp_path)
    training.train(1)
    training.checkpoints.save()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=FULL):
            saved(training.checkpoints, wait)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert Training(tmp_path).checkpoints.load()  # the previous one is still there


def test_a_release_that_cannot_be_noted_is_not_made(tmp_path):
    training = Training(tmp_path)
    before = training.weights.clone()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(CheckpointError, match=FULL):
            training.train(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (training.weights == before).all()
