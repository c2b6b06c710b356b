"""When a run ends early: the rule over results, worked out by hand, and what it refuses."""

import pytest

from fedssl.config.load import compose
from fedssl.early_stopping import StopSettings, reason_to_stop
from fedssl.errors import InputError


def ends(values, **rule):
    """The round after which a run with these results, one every second round, ends; and the reason."""
    results = [(2 * number, {"knn": value}) for number, value in enumerate(values, start=1)]
    for number in range(len(results) + 1):
        reason = reason_to_stop(results[:number], StopSettings(metric="knn", **rule))
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
    assert ends([0.5, 0.75, 0.75], patience=2, least=0.25) == (
        6,
        "knn did not improve by more than 0.25 in 2 evaluations after round 2",
    )
    assert ends([0.5, 0.6875, 0.875, 0.875], patience=2, least=0.25) is None


def test_reach():
    assert ends([0.2, 0.5, 0.9], reach=0.5) == (4, "knn reached 0.5 in round 4")
    assert ends([0.2, 0.49], reach=0.5) is None
    assert ends([0.2, 0.1, 0.5], reach=0.5, patience=1)[0] == 4  # whichever comes first


def test_what_was_decided_stays_so_whatever_follows():
    results = [(round, {"knn": value}) for round, value in enumerate([0.5, 0.4, 0.9], start=1)]
    rule = StopSettings(metric="knn", patience=1)
    assert reason_to_stop(results, rule) == reason_to_stop(results[:2], rule) is not None


def test_without_a_metric_nothing_ends():
    assert reason_to_stop([(1, {"knn": 1.0})] * 99, StopSettings()) is None
    for word in ("stop_when=null", "seed=0"):
        assert compose([word]).evaluation.stop == StopSettings()


def test_settings():
    overrides = ["stop_when.metric=knn", "stop_when.patience=3", "stop_when.least=0.001"]
    assert compose(overrides).evaluation.stop == StopSettings(metric="knn", patience=3, least=0.001)
    assert compose(["stop_when={metric:knn,reach:1}"]).evaluation.stop == StopSettings(metric="knn", reach=1)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("metric=knn patience=0", "whole number of at least 1"),
        ("metric=knn patience=1.5", "whole number of at least 1"),
        ("metric=knn patience=1 least=-0.1", "must be 0 or more"),
        ("metric=knn reach=much", "must be a number"),
        ("metric=3 reach=0.5", "must be the name of a result"),
        ("patience=3", "stop_when has no metric"),
        ("metric=knn", "add stop_when.patience=3"),
        ("metric=knn patience=1 patient=2", "there is no setting 'stop_when.patient'"),
    ],
)
def test_what_is_refused(overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        compose([f"stop_when.{word}" for word in overrides.split()])


def test_without_evaluations_it_is_refused():
    with pytest.raises(InputError, match="set evaluate_every=1 or more"):
        compose(["stop_when.metric=knn", "stop_when.patience=3", "evaluate_every=0"])


def test_a_result_that_an_evaluation_lacks_is_refused():
    with pytest.raises(InputError, match="no result of evaluation, which gives knn, linear; choose"):
        reason_to_stop([(1, {"knn": 0.5, "linear": 0.4})], StopSettings(metric="nearest", patience=1))
