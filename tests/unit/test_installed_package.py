"""The command of the installed package."""

import subprocess
import sys

import megatron_packed


def test_python_m_is_the_console_command():
    """``python -m megatron_packed`` runs the command line and returns its exit code."""
    command = [sys.executable, "-m", "megatron_packed"]
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"megatron_packed {megatron_packed.__version__}\n"
    refused = subprocess.run([*command, "nothing"], capture_output=True, text=True)
    assert refused.returncode == 2 and "nothing: is not a command" in refused.stderr
