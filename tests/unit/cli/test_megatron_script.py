"""Reader of shell scripts: the words are those that a shell passes, and nothing is executed."""

import subprocess
import time

import pytest

from megatron_packed.cli.main import main
from megatron_packed.cli.megatron_script import read_script

SCRIPT = """\
#!/bin/bash
set -euo pipefail   # a comment
export CUDA_DEVICE_MAX_CONNECTIONS=1
NODES=1; GPUS=8
NAME="a run"
SAVE=$1
WORLD=$(($GPUS*$NODES))
mkdir -p ${SAVE}
MODEL_ARGS=(
    --hidden-size 64   # of the model
    --data-path '0.5' "a  b" 0.5 ${NAME} "${NAME}"
)
MODEL_ARGS+=(--lr 1e-3)
options=" \\
    --seq-length 128 \\
    --save ${SAVE} "
options+="--bf16"
pattern="M*-\\"y\\`"
torchrun --nproc_per_node $GPUS --nnodes=${NODES} x/pretrain_hybrid.py "${MODEL_ARGS[@]}" \\
    ${options} --hybrid-layer-pattern "$pattern" --empty "" a${NAME}b --name ${OTHER:-none} \\
    --path "${NAME}/$NODES" "$@" 2>&1 | tee log
"""


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "train.sh"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def by_bash(tmp_path):
    """Return the words that bash passes to torchrun, with ``SAVE`` as the first argument."""

    def run(path: str) -> list[str]:
        stub = tmp_path / "torchrun"
        stub.write_text('#!/bin/sh\nfor word; do printf "<%s>\\n" "$word"; done >> "$LINE"\n')
        stub.chmod(0o755)
        out = tmp_path / "words"
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LINE": str(out)}
        subprocess.run(["bash", path, "SAVE"], env=environ, cwd=tmp_path, check=True)
        return [line[1:-1] for line in out.read_text().splitlines()]

    return run


def test_words_are_those_of_bash(script, by_bash) -> None:
    path = script(SCRIPT)
    line = read_script(path, {})
    found = [word.replace("${SAVE}", "SAVE") for word in line.arguments]
    words = by_bash(path)
    assert [*found, "SAVE"] == words[words.index("x/pretrain_hybrid.py") + 1 :]  # "$@" is SAVE
    assert line.unset == ("SAVE",)
    assert line.launcher == ("--nproc-per-node", "8", "--nnodes", "1")
    assert line.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_the_command_has_the_processes_of_the_script(script, capsys) -> None:
    main(["from-megatron", script("torchrun --nproc_per_node 4 pretrain.py --hidden-size 64\n")])
    shown = capsys.readouterr().out
    assert "megatron-packed train --nproc-per-node 4 \\\n  --hidden-size 64" in shown


def test_flags_are_checked_for_the_processes_of_the_script(script, capsys) -> None:
    for number, refused in (("4", False), ("8", True), ("2 --nnodes 4", True)):
        text = f"torchrun --nproc-per-node {number} pretrain.py --global-batch-size 4 --lr 1e-3\n"
        assert main(["from-megatron", script(text)]) == 2  # options are missing
        shown = capsys.readouterr().out
        assert ("1 refused" in shown) == refused and (
            "#   --global-batch-size 4: must be" in shown
        ) == refused


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("echo nothing", "has no commands with a .py file"),
        ("python a.py --x 1\npython b.py --x 2", "has 2 commands"),
        ("A=1\nif true; then\npython a.py --x\nfi", "has if in line 2, which needs a shell"),
        ('case "$1" in', "has case in line 1"),
        ("source other.sh\npython a.py --x", "has source in line 1"),
        ("f() {\n}", "has a bracket in line 1"),
        (")", "has a bracket in line 1"),
        ("(cd x; python a.py --x)", "has a bracket in line 1"),
        ("A=(1 2", "has a list without an end in line 1"),
        ("A=(1; 2)\npython a.py --x", "has ; in a list in line 1"),
        ("A=(1\n<2)\npython a.py --x", "has < in a list in line 2"),
        ("A=\n'", "has an open quotation mark in line 2"),
        ('python a.py --x "', "has an open quotation mark in line 1"),
        ("python a.py --x $(id)", "uses a substitution in line 1"),
        ("python a.py --x `id`", "uses a substitution in line 1"),
        ("python a.py --x $1", "uses $1 in line 1"),
        ("python a.py --x ${A//b/c}", "uses ${A//b/c} in line 1"),
        ("python a.py --x $(id", "has a substitution without an end in line 1"),
        ("cat <<EOF\npython a.py --x\nEOF", "has a text block (<<) in line 1"),
        ("python a.py --x '$A'", "uses a $ that is no variable in line 1"),
        ("python a.py --x \\$A", "uses a $ that is no variable in line 1"),
        ("python a.py > log --x", "has flags after > in line 1"),
        ("python a.py --x @/etc/passwd", "write a path as ./@NAME"),
        ("A=@/etc/passwd\npython a.py --x $A", "write a path as ./@NAME"),
        (
            "A=aaaaaaaaaa\n" + "A=$A$A\n" * 60 + "python a.py --x $A",
            "more than 8,388,608 characters",
        ),
        ("A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60, "more than 8,388,608 characters"),
        ("A=(a b)\n" + "A=(${A[@]} ${A[@]})\n" * 60, "more than 8,388,608 characters"),
        ("a " * 20_000, "has more than 10,000 words"),
        ("A=" + "${" * 100_000, "has no commands"),
        ("A=" + "$(" * 100_000, "has a substitution without an end"),
        ("A=" + "$()" * 80_000, "has no commands"),
        ("A=" + "'" * 200_000, "has no commands"),
        ("#" * 300_000, "larger than 256 KiB"),
    ],
)
def test_a_script_that_needs_a_shell_gives_one_sentence(script, capsys, text, rule) -> None:
    began = time.perf_counter()
    assert main(["from-megatron", script(text)]) == 2
    shown = capsys.readouterr()
    assert rule in shown.err and shown.err.count("\n") == 1 and not shown.out
    assert len(shown.err) < 500 and time.perf_counter() - began < 20
