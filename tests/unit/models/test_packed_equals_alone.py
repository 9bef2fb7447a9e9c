"""A pack gives the results of its documents run one by one, by the model and by a plain oracle."""

import pytest
import torch

from support import hybrid_cases as cases
from support import plain_model

TOLERANCE = 1e-5
"""max |difference| / max |reference| for each tensor, float32; see `cases.beyond_rounding`."""

PACKS = {
    "awkward lengths": (cases.AWKWARD, {}),
    "with a tail": (cases.AWKWARD, {"tail": 11}),
    "one document": ([3 * cases.CHUNK + 1], {}),
    "over 100 documents": (cases.MANY, {"tail": 5}),
}
# Patterns of several layers contain every kind of layer, so these alone have the largest pack.
PAIRS = [
    (pattern, pack)
    for pattern in cases.PATTERNS
    for pack in PACKS
    if len(pattern) > 1 or pack != "over 100 documents"
]


def check_oracle(model, **pack):
    """Compare with the oracle, which runs one document at a time."""
    documents = cases.make_documents(cases.AWKWARD)
    packed = cases.run_packed(model, documents, **pack)
    oracle = plain_model.run_plain(
        model, documents, cases.VOCAB, cases.count_targets(documents), torch.float64
    )
    assert cases.beyond_rounding(packed, oracle, TOLERANCE) == {}


@pytest.mark.parametrize(("pattern", "pack"), PAIRS)
def test_packed_equals_alone(pattern, pack):
    lengths, options = PACKS[pack]
    model, documents = cases.tiny_model(pattern), cases.make_documents(lengths)
    packed = cases.run_packed(model, documents, **options)
    assert cases.beyond_rounding(packed, cases.run_alone(model, documents), TOLERANCE) == {}


@pytest.mark.shows(
    "eager",
    of=lambda pattern, variant: (1, {"hybrid_layer_pattern": pattern, **cases.VARIANTS[variant]}),
)
@pytest.mark.parametrize(("pattern", "variant"), cases.PATTERNS_AND_VARIANTS)
def test_packed_equals_the_plain_oracle(pattern, variant):
    """The pack has capacity for more documents."""
    check_oracle(cases.tiny_model(pattern, **cases.VARIANTS[variant]), tail=3, spare=9)


def test_each_layer_has_its_own_window():
    """The first attention sees 4 tokens, the second all tokens of its document."""
    model = cases.tiny_model("*-*", window_size="3,0", window_attn_skip_freq="3")
    assert model.config.attention_windows == (4, None)
    check_oracle(model)
