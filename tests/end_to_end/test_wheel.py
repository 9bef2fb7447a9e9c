"""The wheel, installed in an empty environment, has the commands and the files of the quickstart."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from support.runs import REPOSITORY

FEWER = "--train-iters 2 --lr-warmup-iters 1 --eval-interval 2 --eval-iters 1 --seq-length 256"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an environment with the wheel, and otherwise only its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build writes into its source folder
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(
        REPOSITORY / "megatron_packed",
        source / "megatron_packed",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    # Without this, pip would find the checkout and install nothing.
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([*pip, *build], check=True, env=variables)
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    install = ["--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run([*pip, *install], check=True, env=variables)
    # Dependencies come from this interpreter. Its editable install of the checkout does not count,
    # because Python reads the .pth files of this folder only.
    packages = sysconfig.get_path("purelib", vars={"base": str(folder / "env")})
    outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(packages) / "outer.pth").write_text("\n".join(outer))
    return folder / "env"


def run(environment: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the environment in a folder without the repository."""
    variables = {
        "PATH": f"{environment / 'bin'}:/usr/bin:/bin",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=250
    )


def test_the_quickstart_runs_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    """Training with two processes, ten answers and a report need no file of the repository."""
    where = run(
        environment, tmp_path, "python", "-c", "import megatron_packed as m; print(m.__file__)"
    )
    package = Path(where.stdout.strip()).parent
    assert package.is_relative_to(environment), where.stdout + where.stderr
    assert os.path.isfile(package / "py.typed")
    done = run(environment, tmp_path, "megatron-packed", "quickstart", *FEWER.split())
    assert done.returncode == 1, done.stdout + done.stderr  # two steps teach nothing
    assert done.stdout.count("Question: ") == 10
    assert "the model did not learn" in done.stdout
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
    assert (tmp_path / "runs" / "quickstart" / "checkpoints" / "step_00000002").is_dir()
    assert "Traceback" not in done.stderr and "torch.distributed" not in done.stderr
