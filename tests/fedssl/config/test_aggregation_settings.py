"""The ranges of the numbers of privacy and secure aggregation: which of their ends are allowed."""

import math

import pytest

from fedssl.config.aggregation_settings import AggregationSettings, PrivacySettings, SecureAggregationSettings
from fedssl.errors import InputError

PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
SECURE = {"clipping_range": 1.0, "threshold": 0.6}


@pytest.mark.parametrize(
    ("kind", "settings", "key", "allowed", "refused"),
    [
        (PrivacySettings, PRIVATE, "clip_norm", (1e-9, 1e9), (0, -1, math.inf, math.nan, True)),
        (PrivacySettings, PRIVATE, "delta", (0.999,), (0, 1)),
        (SecureAggregationSettings, SECURE, "threshold", (0.501, 1), (0.5, 1.001)),
        (AggregationSettings, {}, "max_norm_ratio", (1, None), (0.999,)),
        (AggregationSettings, {}, "min_updates", (1,), (0, 1.0)),
        (AggregationSettings, {}, "over_selection", (0,), (-1,)),
    ],
)
def test_the_ends_of_the_ranges(kind, settings, key, allowed, refused):
    for value in allowed:
        assert vars(kind(**{**settings, key: value}))[key] == value
    for value in refused:
        with pytest.raises(InputError, match=f"{key}={value} must be"):
            kind(**{**settings, key: value})
