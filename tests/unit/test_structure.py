"""Rules of the source that ``python tests/structure.py`` counts, and tests of its counting.

Sizes, paths and places of a fact have no bound.
"""

from pathlib import Path

import fact_places
import pytest
import structure
import traced_step

NONE = (
    "public_functions_more_than_once",
    "class_names_more_than_once",
    "nested_conditional_expressions",
    "tuple_attribute_assignments",
    "isinstance_full_iteration_elsewhere",
    "docstrings_by_question_word",
    "attribute_docstrings_by_question_word",
)
"""Figures of rules: nothing may break them."""
PRIVATE_REFERENCES = 20
"""References to private names of torch, all in one file: each may vanish in the next torch."""


@pytest.fixture(scope="module")
def figures() -> dict[str, structure.Figure]:
    return structure.source_figures(structure.read_sources(structure.PACKAGE))


@pytest.mark.parametrize("name", NONE)
def test_no_place_breaks_a_rule(name: str, figures) -> None:
    assert figures[name].found == []


def test_private_names_of_torch_are_few_and_in_one_file(figures) -> None:
    assert figures["private_torch_references"].value <= PRIVATE_REFERENCES
    assert figures["private_torch_files"].value == 1


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
    (root / name).parent.mkdir(parents=True, exist_ok=True)
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


def test_only_interfaces_may_repeat_a_name_of_a_function(tmp_path: Path) -> None:
    for name in ("ops/a.py", "a.py", "b.py"):
        sources = write(tmp_path, name, "def serve(): ...\ndef _own(): ...\ndef main(): ...\n")
    assert structure.repeated_functions(sources) == ["main x2: a.py, b.py"]


def test_long_checks_are_no_tests(tmp_path: Path) -> None:
    for name in ("tests/a.py", "tests/soak/b.py", "tests/unit/tools/c.py", "tools/d.py"):
        write(tmp_path, name, "a = 1\n")
    (tmp_path / "benchmarks").mkdir()
    counts = {"tokens: tests": 3, "tokens: tools": 9, "tokens: benchmarks": 0}
    assert structure.tokens_outside(tmp_path) == counts


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


KINDS = """
if symbol == MAMBA or patterns.MOE in kinds or symbol in (MLP, "x"):
    table = {ATTENTION: 1, "M": 2, "x": 3}
if symbol == "M" or name == "M" or layer_types[0] != "-":
    MAMBA
"""


def test_places_of_a_kind(tmp_path: Path) -> None:
    (source,) = write(tmp_path, "training/a.py", KINDS)
    found = [place.split(" ", 1)[1] for place in fact_places.comparisons_of_symbols(source)]
    assert sorted(found) == [
        "ATTENTION",
        "layer_types[0] != '-'",
        "patterns.MOE in kinds",
        "symbol == 'M'",
        "symbol == MAMBA",
        "symbol in (MLP, 'x')",
    ]
    for name in ("b.py", "c.txt", "ops/gated_delta_rule/d.py"):
        write(tmp_path, name, "x = linear_num_key_heads")
    assert fact_places.files_of_a_kind(tmp_path) == ["b.py", "c.txt"]


def test_places_of_an_option_and_of_shapes(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "split_order = 1\nheads = all_heads // tp\nrows = cp.size")
    write(tmp_path, "b.toml", "--split-order")
    write(tmp_path, "c.py", "split_orders = 1")
    write(tmp_path, "layers/d.py", "heads // tp")
    found = fact_places.files_of_options(tmp_path)
    assert found["split_order"] == ["a.py", "b.toml"] and found["answer_end"] == []
    assert fact_places.files_per_option(found) == 0
    assert fact_places.places_of_shapes(tmp_path) == [
        "a.py:2 heads = all_heads // tp",
        "a.py:3 rows = cp.size",
    ]
