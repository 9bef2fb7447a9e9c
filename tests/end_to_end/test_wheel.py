"""The source archive has all files, and its wheel, in an empty environment, what the pages promise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import language
import pytest

from support.runs import REPOSITORY

FEWER = "--train-iters 2 --lr-warmup-iters 1 --eval-interval 2 --eval-iters 1 --seq-length 256"
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
# Without this, pip would find the checkout and install nothing.
VARIABLES = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source archive, built from a copy of the repository's files."""
    folder = tmp_path_factory.mktemp("archive")
    source = folder / "source"  # a build writes into its source folder
    for name in language.listed_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", build, str(folder)]
    subprocess.run(command, check=True, cwd=source, env=VARIABLES, stdout=subprocess.DEVNULL)
    [built] = folder.glob("megatron_packed-*.tar.gz")
    return built


@pytest.fixture(scope="module")
def environment(archive: Path) -> Path:
    """Return the folder of an environment with the wheel, and otherwise only its dependencies."""
    folder = archive.parent
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(archive)]
    subprocess.run([*PIP, *build], check=True, env=VARIABLES)
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*PIP, *install], check=True, env=VARIABLES)
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


def shell_lines(page: str, word: str) -> str:
    """Return the lines of a page's shell examples that contain a word."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (REPOSITORY / "docs" / page).read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines() if word in line]
    assert lines, f"no example of {page} has {word}"
    return "\n".join(lines)


def test_the_source_archive_has_every_file_of_the_repository(archive: Path) -> None:
    with tarfile.open(archive) as files:
        names = {member.name.partition("/")[2] for member in files if member.isfile()}
    made = {name for name in names if re.match(r"PKG-INFO|\w+\.egg-info/", name)}
    assert names - made == {*language.listed_files()} - made


def test_the_wheel_has_every_file_of_the_package(environment: Path) -> None:
    """READMEs for those who change the code are only in the source archive."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    files = [name for name in language.listed_files(["megatron_packed"]) if "README" not in name]
    assert len(files) > 500
    assert [name for name in files if not (packages / name).is_file()] == []


def test_patches_of_the_wheel_are_found_as_their_page_says(
    environment: Path, tmp_path: Path
) -> None:
    path = shell_lines("te_patches.md", "sysconfig")
    code = "import te_thd_patch; te_thd_patch.undo(); print(te_thd_patch.__file__)"
    done = run(environment, tmp_path, "bash", "-c", f"{path}\npython -c '{code}'")
    assert Path(done.stdout.strip()).is_relative_to(environment), done.stdout + done.stderr


def test_examples_of_the_wheel_run_in_the_folder_of_a_user(
    environment: Path, tmp_path: Path
) -> None:
    """Templates for SLURM start, and a recipe is read with the model's file, by both programs."""
    copied = run(environment, tmp_path, "bash", "-ec", shell_lines("launching.md", "sysconfig"))
    assert copied.returncode == 0, copied.stderr
    for name in ("pretrain", "sweep_capacities"):
        refused = run(environment, tmp_path, "bash", f"examples/slurm/{name}.sbatch")
        assert refused.returncode == 2 and refused.stderr.startswith("usage: sbatch")
    for folder in ("text", "text_valid"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        (tmp_path / "data" / folder / "a.jsonl").write_text('{"text": "words"}\n')
    (tmp_path / "data" / "tokenizer.json").write_text("{}")
    recipe = ("--print-config", "@examples/recipes/hybrid_1b.pretrain.args")
    for program in (("megatron-packed", "train"), ("python", "-m", "pretrain_hybrid")):
        printed = run(environment, tmp_path, *program, *recipe)
        assert printed.returncode == 0, printed.stderr
        assert "hidden_size: 2048" in printed.stdout


def test_the_quickstart_runs_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    """Training with two processes, ten answers and a report need no file of the repository."""
    where = run(
        environment, tmp_path, "python", "-c", "import megatron_packed as m; print(m.__file__)"
    )
    package = Path(where.stdout.strip()).parent
    assert package.is_relative_to(environment), where.stdout + where.stderr
    done = run(environment, tmp_path, "megatron-packed", "quickstart", *FEWER.split())
    assert done.returncode == 1, done.stdout + done.stderr  # two steps teach nothing
    assert done.stdout.count("Question: ") == 10
    assert "the model did not learn" in done.stdout
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
    assert (tmp_path / "runs" / "quickstart" / "checkpoints" / "step_00000002").is_dir()
    assert "Traceback" not in done.stderr and "torch.distributed" not in done.stderr
