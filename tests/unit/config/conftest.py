"""Fixture with a valid command line, for tests that change one thing about it."""

from pathlib import Path

import pytest

from megatron_packed.config.environment_variables import DETERMINISTIC, FASTEST


@pytest.fixture
def right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Return flags and values of a small valid run in a temporary directory; every kernel counts as
    installed.
    """
    monkeypatch.chdir(tmp_path)
    # Collecting the GPU tests may already have set the variables of FASTEST.
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", *DETERMINISTIC, *FASTEST):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("megatron_packed.config.kernel_options.may_have_gpu", lambda environ: True)
    monkeypatch.setattr("megatron_packed.config.kernel_options.is_installed", lambda module: True)
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "null.html").symlink_to("/dev/null")
    (tmp_path / "nothing.jsonl").touch()
    (tmp_path / "corpus_text.bin").write_bytes(b"\0")
    (tmp_path / "valid.jsonl").write_text('{"text": "two"}\n')
    return {
        "--hybrid-layer-pattern": "M*-",
        "--hidden-size": "256",
        "--num-attention-heads": "4",
        "--seq-length": "128",
        "--train-iters": "20",
        "--lr": "1e-3",
        "--data-path": "train.jsonl",
    }
