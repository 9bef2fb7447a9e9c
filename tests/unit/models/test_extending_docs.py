"""The page about extensions: its code is that of the tested example, and the files it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "extending.md").read_text()
EXAMPLES = [*(ROOT / "tests" / "data" / "new_kind").rglob("*.py")]
EXAMPLES += [ROOT / "megatron_packed" / "config" / "sections" / "packing.py"]


def test_the_code_is_that_of_the_example():
    texts = [path.read_text() for path in EXAMPLES]
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        assert any(
            "\n".join(lines)
            in "\n".join(line.strip() for line in text.splitlines() if line.strip())
            for text in texts
        ), block


def test_the_files_of_the_page_exist():
    """So do the names that stand beside a file in a table."""
    paths = set(re.findall(r"`((?:[\w.]+/)+\w+(?:\.\w+)?)`", PAGE))
    assert len(paths) > 15
    for path in paths:
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "megatron_packed")), path
    for name, path in re.findall(r"`([A-Za-z_]+)` in `(tests/[\w/.]+)`", PAGE):
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), (name, path)
