"""te_patches is a folder for PYTHONPATH, not a package. It is on the path for one test at a time."""

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
    """Return the module te_thd_patch, newly imported and not installed."""
    return importlib.import_module("te_thd_patch")


@pytest.fixture
def known(patch):
    """Return the module te_thd_sources, newly imported."""
    return importlib.import_module("te_thd_sources")
