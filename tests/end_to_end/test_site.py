"""The site of the documentation builds without a warning, and reaches every page from its start."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROKEN = {
    "links": {
        "no_such_page.md": "[a page](no_such_page.md)",
        "#no-such-heading": "[a heading](#no-such-heading)",
    },
    "names": {"NoSuchName": "::: megatron_packed.packed.params.NoSuchName"},
}
"""Faults of a page, and the word by which the build reports each of them."""


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d"]
    return subprocess.run(
        [*command, str(site)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(ROOT / "mkdocs.yml", folder)
    warnings = [line for line in result.stderr.splitlines() if not line.startswith("INFO")]
    assert result.returncode == 0, "\n".join(warnings)
    return folder


def links_of(page: Path) -> set[Path]:
    """Pages of the site that links in the text of a page lead to, navigation excluded."""
    article = page.read_text().partition("<article")[2].partition("</article>")[0]
    targets = re.findall(r'href="([^"#:]+\.html)', article)
    return {(page.parent / target).resolve() for target in targets}


def test_every_guide_is_two_clicks_from_the_start(site) -> None:
    first = links_of(site / "index.html")
    reached = first.union(*map(links_of, first))
    guides = {path.resolve() for path in site.glob("*.html")} | {
        path.resolve() for path in site.glob("tutorials/*.html")
    }
    left_out = {site / "index.html", site / "404.html"}
    assert len(guides) > 30
    assert guides - reached - left_out == set()


def test_the_api_describes_public_classes(site) -> None:
    page = (site / "api" / "megatron_packed.html").read_text()
    assert "megatron_packed.packed.params.PackedSeqParams" in page
    assert "cu_seqlens" in page


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_references_fail_the_build(kind: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    faults = "\n\n".join(BROKEN[kind].values())
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n{faults}\n")
    lines = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    lines = re.sub(r"hooks:\n.*\n", "", lines).replace("paths: [.]", f"paths: ['{ROOT}']")
    (tmp_path / "mkdocs.yml").write_text(lines)
    result = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert result.returncode != 0, result.stderr
    for word in BROKEN[kind]:
        assert word in result.stderr, result.stderr
