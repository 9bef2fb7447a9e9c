"""`support/code_prints.py`: which changes of tests and helpers change a test's fingerprint."""

import textwrap

import pytest

from support.code_prints import Sources, fingerprint_of_test

FILES = {
    "conftest.py": """
        @pytest.fixture
        def model():
            return 1
        """,
    "support/helper.py": """
        LIMIT = 2

        def inner(x):
            return x < LIMIT

        def checked(x):
            return inner(x)

        def unused():
            return 0
        """,
    "unit/test_it.py": """
        from package import other
        from support import helper as tools
        from support.helper import checked

        CASES = [1, 2]

        @pytest.fixture(autouse=True)
        def always():
            yield

        @pytest.mark.parametrize("case", CASES)
        def test_a(case, model):
            '''Say what is checked.'''
            assert checked(case) and other(model)

        def test_b():
            assert tools.checked(0)
        """,
}


@pytest.fixture
def print_of(tmp_path):
    """Return a function that writes the files, with one text replaced, and returns a fingerprint."""

    def written(old="", new="", file="unit/test_it.py", test="test_a"):
        for name, text in FILES.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            assert not old or any(old in text for text in FILES.values())
            path.write_text(
                textwrap.dedent(text).replace(old, new) if old else textwrap.dedent(text)
            )
        if file != "unit/test_it.py":
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / "unit/test_it.py").rename(tmp_path / file)
        tests = Sources(tmp_path, tmp_path, fixtures=True)
        return fingerprint_of_test(tests, tmp_path / file, test)

    return written


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("assert checked(case)", "assert not checked(case)"),
        ("CASES = [1, 2]", "CASES = [1]"),  # parametrisation
        ('"case", CASES', '"case", [3]'),
        ("return 1", "return 2"),  # fixture of conftest.py
        ("yield", "yield 1"),  # fixture without a name in the test
        ("return inner(x)", "return not inner(x)"),  # imported helper
        ("LIMIT = 2", "LIMIT = 3"),  # constant of a helper of the helper
    ],
)
def test_changes_of_the_code(old, new, print_of):
    assert print_of() != print_of(old, new)


@pytest.mark.parametrize(
    ("old", "new", "how"),
    [
        ("Say what is checked.", "Say it in other words.", {}),
        ("assert checked(case) and", "assert (  # why\n        checked(case)) and", {}),
        ("test_a", "test_c", {"test": "test_c"}),
        ("", "", {"file": "gpu/test_moved.py"}),
        ("return 0", "return 1", {}),  # unused helper
        ("tools.checked(0)", "tools.checked(1)", {}),  # another test
    ],
)
def test_changes_that_are_not_of_the_code(old, new, how, print_of):
    assert print_of() == print_of(old, new, **how)


def test_attributes_of_imported_modules_are_followed(print_of):
    assert print_of(test="test_b") != print_of("LIMIT = 2", "LIMIT = 3", test="test_b")
