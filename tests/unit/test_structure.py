"""Bounds of the figures that ``python tests/structure.py`` prints, and tests of their counting."""

from pathlib import Path

import pytest
import structure
import traced_step

AT_MOST = {
    "frames_from_model_to_attention": 8,
    "switches_of_one_step": 300,
    "tokens_per_line": 5.5,
    "class_names_more_than_once": 0,
    "nested_conditional_expressions": 0,
    "tuple_attribute_assignments": 0,
    "files_in_cuda_graphs": 12,
    "isinstance_full_iteration_elsewhere": 0,
    "private_torch_references": 19,
    "private_torch_files": 1,
    "docstrings_by_question_word": 0,
    "attribute_docstrings_by_question_word": 0,
}
PRINTED_ONLY = {"files_over_400_lines", "functions_over_60_lines"}
"""Figures without a bound: a file is as long as its one subject, and so is a function."""
AT_LEAST = {
    "comments_per_1000_lines_in_cuda_graphs": 25,
    "comments_per_1000_lines_in_memory": 25,
    "comments_per_1000_lines_in_distributed": 25,
    "comments_per_1000_lines_in_training": 25,
}


@pytest.fixture(scope="module")
def figures() -> dict[str, structure.Figure]:
    return structure.all_figures()


@pytest.mark.parametrize("name", AT_MOST)
def test_figure_stays_below_its_bound(name: str, figures) -> None:
    assert 0 <= figures[name].value <= AT_MOST[name], "\n".join(figures[name].found)


@pytest.mark.parametrize("name", AT_LEAST)
def test_figure_stays_above_its_bound(name: str, figures) -> None:
    assert figures[name].value >= AT_LEAST[name]


def test_every_figure_has_a_bound(figures) -> None:
    assert figures.keys() == AT_MOST.keys() | AT_LEAST.keys() | PRINTED_ONLY


SOURCE = '''"""Of a module."""
import torch
import torch.distributed as dist
from torch._C import _name
LIMIT = 1  # one why
"""Which limit."""
other = 2  # noqa: a directive


class Twice:
    """How it is."""

    class Twice:
        """Return a verb."""

    def set(self, a, b):
        self.a, self.b = a, b
        self.c, self.d = self.pair()
        return 1 if a else (2 if b else f"{a} {b}")


# A second why.
torch._C._hidden(dist._pair, torch.__version__, dist.barrier, Twice._own)
isinstance(other, (int, FullIterationGraphs))
'''
COUNTED = {
    "class_names_more_than_once": 1,
    "nested_conditional_expressions": 1,
    "tuple_attribute_assignments": 1,
    "isinstance_full_iteration_elsewhere": 1,
    "private_torch_references": 3,
    "private_torch_files": 1,
    "docstrings_by_question_word": 2,
    "attribute_docstrings_by_question_word": 1,
    "functions_over_60_lines": 0,
    "comments_per_1000_lines_in_training": 2000 / 24,
}


def write(root: Path, name: str, text: str) -> list[structure.Source]:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)
    return structure.read_sources(root)


def test_what_is_counted(tmp_path: Path) -> None:
    found = structure.source_figures(write(tmp_path, "training/a.py", SOURCE))
    values = {name: found[name].value for name in COUNTED}
    assert values == pytest.approx(COUNTED, abs=0.1), found


def test_tokens_are_names_numbers_strings_and_operators(tmp_path: Path) -> None:
    text = "# why\n\nif a:\n    b = f'{c} {d}' + 1\n"
    found = structure.source_figures(write(tmp_path, "a.py", text))
    assert found["tokens_per_line"].value == 8 / 4  # if a : b = f'' + 1


@pytest.mark.parametrize("lines, count", [(60, 0), (61, 1)])
def test_a_function_may_have_60_lines(lines: int, count: int, tmp_path: Path) -> None:
    sources = write(tmp_path, "a.py", "def f():\n" + "    pass\n" * (lines - 1))
    assert structure.source_figures(sources)["functions_over_60_lines"].value == count


@pytest.mark.parametrize("lines, count", [(60, 0), (61, 1)])
def test_the_signature_of_a_kernel_is_counted_apart(lines: int, count: int, tmp_path: Path) -> None:
    text = "@triton.jit\ndef f(\n" + "    x,\n" * 40 + "):\n" + "    pass\n" * lines
    assert (
        structure.source_figures(write(tmp_path, "a.py", text))["functions_over_60_lines"].value
        == count
    )


def test_frames_and_switches_are_of_the_package_alone(tmp_path: Path) -> None:
    """Only calls inside the package count: three calls change the file, into a, b and a."""
    namespace: dict = {"outside": lambda call: call()}
    for name, code in {
        "a.py": "def start(): helper(); outside(end)\ndef helper(): pass\ndef back(): pass",
        "b.py": "def end(): back()",
    }.items():
        exec(compile(code, str(tmp_path / name), "exec"), namespace)
    start, end = namespace["start"], namespace["end"]
    tracer = traced_step.Tracer(tmp_path, start.__code__, end.__code__)
    with tracer:
        start()
    assert tracer.road == ["a.py:1 start", "b.py:1 end"]
    assert tracer.switches == ["a.py:1 start", "b.py:1 end", "a.py:3 back"]
