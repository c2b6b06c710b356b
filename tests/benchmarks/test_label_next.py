"""Images that the benchmark of label_next accepts."""

import pytest

from benchmarks import label_next
from fedssl.errors import InputError


def test_first_labels_that_miss_a_class_are_refused(monkeypatch):
    train, test = label_next.labeled_splits(["dataset=digits"])
    assert (len(train.images), len(test.images)) == (1438, 359)
    monkeypatch.setattr(label_next, "FIRST", 9)
    with pytest.raises(InputError, match="the 9 first labels name every class; choose images with at most 9 classes"):
        label_next.labeled_splits(["dataset=digits"])
