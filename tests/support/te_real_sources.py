"""Download of the sources of real TransformerEngine releases with pip, for the tests of te_patches.

The wheel ``transformer-engine`` contains only Python and has about 1 MB. The two required modules
are kept in ``runs/te_sources``, which git ignores. To download by hand: ``python
tests/support/te_real_sources.py 2.8.0 2.17.1``.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
TE_PATCHES = ROOT / "te_patches"
CACHE = ROOT / "runs" / "te_sources"
FOLDER = "transformer_engine/pytorch/attention/dot_product_attention"
FILES = ("dot_product_attention.py", "context_parallel.py")


class Unreachable(Exception):
    """The package index did not provide a release; the message has pip's output."""


def sources(version: str) -> dict[str, str]:
    """Return module -> source text of one release, from the cache or from the package index."""
    folder = CACHE / version
    if not all((folder / file).exists() for file in FILES):
        _fetch(version, folder)
    package = FOLDER.replace("/", ".")
    return {f"{package}.{file.removesuffix('.py')}": (folder / file).read_text() for file in FILES}


def fetch_all(versions: list[str]) -> None:
    """Download the releases that the cache lacks, two at a time.

    Raises:
        Unreachable: a release could not be downloaded.
    """
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(sources, versions))


def _fetch(version: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        command += [
            "--ignore-requires-python",
            "--retries",
            "0",
            "--timeout",
            "10",
            "--dest",
            scratch,
        ]
        try:
            done = subprocess.run(
                [*command, f"transformer-engine=={version}"],
                capture_output=True,
                text=True,
                timeout=60,
            )
        except subprocess.TimeoutExpired:
            raise Unreachable(
                f"pip download of transformer-engine {version} took more than 60 s"
            ) from None
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise Unreachable(f"pip could not download transformer-engine {version}: {last[0]}")
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheels[0]) as wheel:
            for file in FILES:
                half = folder / f"{file}.{os.getpid()}"
                half.write_bytes(wheel.read(f"{FOLDER}/{file}"))
                half.replace(folder / file)


if __name__ == "__main__":
    fetch_all(sys.argv[1:])
    print(*(str(CACHE / version) for version in sys.argv[1:]), sep="\n")
