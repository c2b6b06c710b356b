"""Scores in files and in displayed text."""

import json
import math

import pytest

from fedssl.evaluation.scores import (
    Score,
    as_scores,
    format_table,
    mean_over_models,
    num_test_images,
    to_flat_dict,
    units_of,
)


def test_scores_round_trip_through_files():
    scores = {"knn": Score(0.5), "few": Score(0.25, std=0.1), "loss": Score(2.5, "nats", 0.5), "epochs": Score(3, "")}
    numbers, units = to_flat_dict(scores), units_of(scores)
    assert numbers == {"knn": 0.5, "few": 0.25, "few_std": 0.1, "loss": 2.5, "loss_std": 0.5, "epochs": 3}
    assert units == {"knn": "accuracy", "few": "accuracy", "loss": "nats", "epochs": ""}
    assert as_scores(json.loads(json.dumps(numbers)), units) == scores
    assert as_scores(scores) == scores


def test_a_result_with_the_name_of_a_deviation_is_kept():
    """Such as those on a domain ``std``. The name of the deviation of ``few`` is taken."""
    scores = {"knn": Score(0.9), "knn_std": Score(0.6), "few": Score(0.5, std=0.1), "few_std": Score(0.2, std=0.3)}
    numbers, units = to_flat_dict(scores), units_of(scores)
    assert numbers == {"knn": 0.9, "knn_std": 0.6, "few": 0.5, "few_std": 0.2, "few_std_std": 0.3}
    assert as_scores(numbers, units) == scores | {"few": Score(0.5)}
    assert to_flat_dict(dict(reversed(scores.items()))) == numbers


def test_results_over_models_are_means_and_deviations():
    result = mean_over_models(
        [{"few": Score(0.2, std=0.01), "l": Score(1, "m")}, {"few": Score(0.6), "l": Score(3, "m")}]
    )
    # Deviations from the means 0.4 and 2 are 0.2 and 1; with divisor 2 - 1 they give 0.2 * sqrt 2 and sqrt 2.
    few, length = result["few"], result["l"]
    assert (few.value, few.std, few.unit) == (pytest.approx(0.4), pytest.approx(0.2 * math.sqrt(2)), "accuracy")
    assert (length.value, length.std, length.unit) == (2, pytest.approx(math.sqrt(2)), "m")
    assert mean_over_models([{"few": Score(0.2, std=0.01)}]) == {"few": Score(0.2, std=0.01)}
    assert mean_over_models([{}, {"few": Score(0.2)}]) == {"few": Score(0.2)}  # that of the other model is undefined
    assert mean_over_models([{}, {}]) == {}


def test_the_number_of_test_images_is_known_if_all_agree():
    models = [{"knn": Score(0.2, num_images=8), "mae": Score(3, "m", num_images=number)} for number in (8, 9)]
    assert num_test_images(models) == num_test_images([mean_over_models(models)]) == {"knn": 8}
    assert format_table({"one": models[0], "two": models[1]}).split("\n") == [
        "accuracy in %   one   two  test images",
        "knn            20.0  20.0            8",
        "mae (m)           3     3            -",
    ]


def test_format_table():
    table = format_table(
        {
            "untrained": {"linear_2_per_class": Score(0.5, std=0.05), "knn": Score(0.6666)},
            "federated": {"linear_2_per_class": Score(0.875, std=0.0123), "knn": Score(1.0)},
            "pixels": {"knn": Score(0.0)},
        }
    )
    assert table.split("\n") == [
        "accuracy in %        untrained   federated  pixels",
        "linear_2_per_class  50.0 ± 5.0  87.5 ± 1.2       -",
        "knn                       66.7       100.0     0.0",
    ]
