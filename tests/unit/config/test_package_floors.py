"""Oldest versions of packages: one table, also in setup.cfg, and a refusal at the start."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed.config import optional_packages, path_checks
from megatron_packed.config.optional_packages import PACKAGES, old_package, required_packages
from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.table_rows import check_pyarrow

REPOSITORY = Path(__file__).parents[3]


def requirements() -> dict[str, set[str]]:
    """Return name -> floors of all requirements in setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg")
    lists = [parser["options"]["install_requires"], *parser["options.extras_require"].values()]
    found: dict[str, set[str]] = {}
    for line in "\n".join(lists).splitlines():
        if match := re.match(r"([\w-]+)(?:\[.*\])?(?:>=([\d.]+))?", line.strip()):
            found.setdefault(match[1], set()).add(match[2] or "")
    return found


def test_setup_cfg_has_the_floors_of_the_table() -> None:
    floors = {package.name: package.floor for package in PACKAGES}
    listed = requirements()
    assert {name: {floors[name]} for name in listed if name in floors} == {
        name: found for name, found in listed.items() if name in floors
    }
    required = [package for package in PACKAGES if package.required]
    assert all(package.floor and package.name in listed for package in required)


def pretend(monkeypatch, **versions: str) -> None:
    real = optional_packages.version_of
    monkeypatch.setattr(
        optional_packages, "version_of", lambda name: versions.get(name) or real(name)
    )


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("3.1.5", True),
        ("3.1.6rc1", False),
        ("3.1.6", False),
        ("3.1.10", False),
        ("3.2", False),
        ("2.11.0a0+git", True),
        ("unknown", True),
    ],
)
def test_versions_are_compared_by_their_numbers(monkeypatch, version: str, old: bool) -> None:
    pretend(monkeypatch, jinja2=version)
    assert (old_package("jinja2") is not None) == old


def test_old_packages_end_the_start_with_one_sentence(monkeypatch, capsys) -> None:
    pretend(monkeypatch, jinja2="3.1.5", numpy="1.21.0")
    with pytest.raises(SystemExit) as ended, required_packages():
        raise AssertionError("the block runs")
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"{sys.executable} has numpy 1.21.0, which is older than 1.26, and jinja2 3.1.5, which is "
        "older than 3.1.6; run pip install 'numpy>=1.26' 'jinja2>=3.1.6'.\n"
    )
    with required_packages(any_version=True):
        pass


def test_a_command_ends_before_it_begins(tmp_path, monkeypatch) -> None:
    info = tmp_path / "jinja2-3.1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jinja2\nVersion: 3.1.5\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    for program in (["-m", "megatron_packed", "plan"], [str(REPOSITORY / "pretrain_hybrid.py")]):
        ran = subprocess.run([sys.executable, *program], capture_output=True, text=True)
        assert ran.returncode == 2 and "run pip install 'jinja2>=3.1.6'" in ran.stderr
        assert ran.stderr.count("\n") == 1


def test_tables_are_not_read_by_an_old_pyarrow(monkeypatch) -> None:
    pretend(monkeypatch, pyarrow="14.0.0")
    sentence = r"t\.parquet would be read by pyarrow 14\.0\.0, which is older than 14\.0\.1; run"
    with pytest.raises(DataError, match=sentence):
        check_pyarrow(Path("t.parquet"))
    rule, cure = path_checks._pyarrow()
    assert "pyarrow 14.0.0" in rule and cure == "pip install 'pyarrow>=14.0.1'"
