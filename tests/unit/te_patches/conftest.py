"""te_patches is a folder for PYTHONPATH, not a package: it is put on the path for one test at a
time.
"""

import importlib
import sys

import pytest

from support.te_real_sources import TE_PATCHES


@pytest.fixture
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(TE_PATCHES))
    yield
    for name in ("te_thd_patch", "te_thd_sources"):
        sys.modules.pop(name, None)


@pytest.fixture
def patch(on_path):
    """The module te_thd_patch, fresh and not installed."""
    return importlib.import_module("te_thd_patch")


@pytest.fixture
def known(patch):
    """The module te_thd_sources, fresh."""
    return importlib.import_module("te_thd_sources")
