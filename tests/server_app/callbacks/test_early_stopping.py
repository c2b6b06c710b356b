"""When a run ends early: the rule over results, worked out by hand, and what it refuses."""

import pytest

from fedssl.config.load import compose
from fedssl.errors import InputError
from server_app.callbacks.early_stopping import EarlyStopping, stop_reason


def ends(values, **rule):
    """The round after which a run with these results, one every second round, ends; and the reason."""
    results = [(2 * number, {"knn": value}) for number, value in enumerate(values, start=1)]
    for number in range(len(results) + 1):
        reason = stop_reason(results[:number], EarlyStopping(monitor="knn", **rule))
        if reason:
            return results[number - 1][0], reason
    return None


def test_patience():
    # The best is 0.5 of round 4; rounds 6 and 8 equal or miss it: two in a row.
    assert ends([0.4, 0.5, 0.5, 0.45, 0.9], patience=2) == (8, "knn did not improve in 2 evaluations after round 4")
    # Round 6 is a new best, so counting starts anew, and round 8 is the first without one.
    assert ends([0.4, 0.4, 0.5, 0.5], patience=2) is None
    assert ends([0.4, 0.4], patience=1) == (4, "knn did not improve in 1 evaluation after round 2")
    assert ends([], patience=1) is None
    assert ends([-3.0], patience=1) is None  # the first is an improvement whatever it is


def test_least():
    # 0.25 above 0.5 is not more than 0.25; steps that are too small add up, for the best stays 0.5: 0.875 counts.
    reason = "knn did not improve by more than 0.25 in 2 evaluations after round 2"
    assert ends([0.5, 0.75, 0.75], patience=2, min_delta=0.25) == (6, reason)
    assert ends([0.5, 0.6875, 0.875, 0.875], patience=2, min_delta=0.25) is None


def test_reach():
    assert ends([0.2, 0.5, 0.9], threshold=0.5) == (4, "knn reached 0.5 in round 4")
    assert ends([0.2, 0.49], threshold=0.5) is None
    assert ends([0.2, 0.1, 0.5], threshold=0.5, patience=1)[0] == 4  # whichever comes first


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("monitor=knn patience=0", "early_stopping.patience=0 must be an integer of at least 1, or null"),
        ("monitor=knn patience=1.5", "early_stopping.patience=1.5 must be an integer of at least 1, or null"),
        ("monitor=knn patience=1 min_delta=-0.1", "early_stopping.min_delta=-0.1 must be a number of at least 0; the"),
        ("monitor=knn threshold=much", "early_stopping.threshold=much must be a number, or null"),
        ("patience=3", "early_stopping has a criterion but no monitor"),
        ("monitor=knn", "set early_stopping.patience=3"),
        ("monitor=knn patience=1 patient=2", "there is no setting 'early_stopping.patient'"),
    ],
)
def test_what_is_refused(overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        compose([f"early_stopping.{word}" for word in overrides.split()])


def test_without_evaluations_it_is_refused():
    with pytest.raises(InputError, match="set evaluate_every=1 or more"):
        compose(["early_stopping.monitor=knn", "early_stopping.patience=3", "evaluate_every=0"])


def test_a_result_that_an_evaluation_lacks_is_refused():
    with pytest.raises(InputError, match="not a result of evaluation, which has knn, linear; choose"):
        stop_reason([(1, {"knn": 0.5, "linear": 0.4})], EarlyStopping(monitor="nearest", patience=1))
