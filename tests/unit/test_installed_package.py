"""The installed package: its command, and its py.typed file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_packed

ROOT = Path(__file__).parents[2]


def test_python_m_is_the_console_command():
    """``python -m megatron_packed`` runs the command line and returns its exit code."""
    command = [sys.executable, "-m", "megatron_packed"]
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"megatron_packed {megatron_packed.__version__}\n"
    refused = subprocess.run([*command, "nothing"], capture_output=True, text=True)
    assert refused.returncode == 2 and "invalid choice: 'nothing'" in refused.stderr


def test_a_wheel_has_the_marker_of_types(monkeypatch):
    """The build copies py.typed, so that type checkers read the annotations."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.chdir(ROOT)
    distribution = setuptools.Distribution()
    distribution.parse_config_files([str(ROOT / "setup.cfg")])
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    of_package = {package: files for package, _, _, files in build.data_files}
    assert "py.typed" in of_package["megatron_packed"]
    assert os.path.isfile(ROOT / "megatron_packed" / "py.typed")
