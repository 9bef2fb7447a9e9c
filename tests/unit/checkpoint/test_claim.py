"""One run per directory, told before the first step."""

import pytest

from megatron_packed.checkpoint.claim import claim_directory
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.checkpoint.state import whole_tensors


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path, tools):
    first = claim_directory(tmp_path / "new" / "run")
    assert first is not None
    with pytest.raises(CheckpointError, match=r"another run writes its checkpoints here.*its own --save directory"):
        claim_directory(tmp_path / "new" / "run", patience=0)
    save_checkpoint(tmp_path / "new" / "run", 20, whole_tensors(tools.make_state()), {})  # its own saves pass
    first.close()
    claim_directory(tmp_path / "new" / "run", patience=0).close()


def test_a_run_waits_for_one_that_is_going(tmp_path, monkeypatch):
    first = claim_directory(tmp_path)
    monkeypatch.setattr("megatron_packed.checkpoint.claim.time.sleep", lambda seconds: first.close())
    claim_directory(tmp_path).close()


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"(?s)preparing .*file/run for checkpoints.*NotADirectoryError"):
        claim_directory(tmp_path / "file" / "run")
