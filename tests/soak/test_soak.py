"""A few cases of each script; see README.md for more of them."""

import pytest


def test_damaged_files():
    import damage

    assert damage.main(files=21, seed=2) == 0


def test_models_of_transformers():
    pytest.importorskip("transformers")
    import transformers_models

    assert transformers_models.main(models=4, seed=2) == 0
