"""Writes of STATUS.json: to the right directory, and never through links."""

from pathlib import Path

from megatron_packed.training.failures import StatusFolder, write_status


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    status = StatusFolder(str(folder))
    for name in ("STATUS.json", "STATUS.part"):
        (folder / name).symlink_to(victim)
    write_status(status, {"exit_code": 0})
    assert victim.read_text() == "precious"
    assert (folder / "STATUS.json").read_text() == '{"exit_code": 0}\n' and not (
        folder / "STATUS.json"
    ).is_symlink()
    status.clear()
    assert sorted(path.name for path in folder.iterdir()) == ["STATUS.part"]


def test_it_follows_its_directory(tmp_path: Path) -> None:
    """After the directory is moved, nothing is written to a new directory at its old path."""
    status = StatusFolder(str(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    write_status(status, {"exit_code": 4})
    assert (tmp_path / "moved" / "STATUS.json").exists() and not list((tmp_path / "run").iterdir())


def test_what_cannot_be_written_is_said(tmp_path: Path, capsys) -> None:
    status = StatusFolder(str(tmp_path / "run"))
    (tmp_path / "run" / "STATUS.json").mkdir()
    write_status(status, {"exit_code": 4})
    assert "STATUS.json cannot be written: " in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["STATUS.json"]
