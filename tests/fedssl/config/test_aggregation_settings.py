"""The ranges of the numbers of aggregation, privacy and secure aggregation: which of their ends are allowed."""

import pytest
import yaml

from fedssl.config.constraints import constraint_of
from fedssl.config.load import compose
from fedssl.errors import InputError


@pytest.mark.parametrize(
    ("key", "allowed", "refused", "sentence"),
    [
        ("privacy.clip_norm", [1e-9, 1e6], ["0", "-1", "inf", "nan", "true"], "a number above 0, or null"),
        ("privacy.noise_multiplier", [1e-9, 1e6], ["0", "inf", "null"], "a number above 0"),
        ("privacy.delta", [1e-9, 0.099], ["0", "1"], "a number above 0 and below 1"),
        ("secure_aggregation.clipping_range", [1e-9, 1e6], ["0", "inf"], "a number above 0, or null"),
        ("secure_aggregation.threshold", [2, None], ["1", "0.67"], "an integer of at least 2, or null"),
        ("secure_aggregation.neighbors", [2, None], ["1", "auto"], "an integer of at least 2, or null"),
        ("secure_aggregation.dropout_fraction", [0, 0.999], ["-0.1", "1"], "a number of at least 0 and below 1"),
        ("secure_aggregation.corrupted_fraction", [0, 0.999], ["-0.1", "1"], "a number of at least 0 and below 1"),
        ("secure_aggregation.security_bits", [1, 128], ["0"], "a number from 1 to 128"),
        ("secure_aggregation.correctness_bits", [1, 128], ["0"], "a number from 1 to 128"),
        ("secure_aggregation.mask_generator", ["chacha20", "mt19937"], ["aes"], "chacha20 or mt19937"),
        ("aggregation.max_norm_ratio", [1, None], ["0.999"], "a number of at least 1, or null"),
        ("aggregation.round_deadline", [1e-9, None], ["0"], "a number above 0, or null"),
        ("aggregation.min_updates", [1], ["0", "1.0"], "an integer of at least 1"),
        ("aggregation.max_retries", [0], ["-1"], "an integer of at least 0"),
        ("aggregation.over_selection", [0], ["-1"], "an integer of at least 0"),
        ("aggregation.max_examples", [1, None], ["0"], "an integer of at least 1, or null"),
    ],
)
def test_the_ends_of_the_ranges(key, allowed, refused, sentence):
    constraint = constraint_of(key)
    assert str(constraint) == sentence
    assert all(constraint.allows(value) for value in allowed)
    assert not any(constraint.allows(yaml.safe_load(text.replace("inf", ".inf"))) for text in refused)


def test_a_value_out_of_range_is_refused_with_the_default():
    message = "^aggregation.min_updates=0 must be an integer of at least 1; the default is 1$"
    with pytest.raises(InputError, match=message):
        compose(["aggregation.min_updates=0"])


@pytest.mark.parametrize(
    ("group", "choice", "key"),
    [
        ("privacy", "central", "clip_norm"),
        ("secure_aggregation", "secagg_plus", "clipping_range"),
        ("calibration", "auxiliary", "when"),
    ],
)
def test_null_does_not_turn_off_a_chosen_protection(group, choice, key):
    message = f"^{group}.{key}=null disables {group}={choice}; set a value, or {group}=none$"
    with pytest.raises(InputError, match=message):
        compose([f"{group}={choice}", f"{group}.{key}=null"])
