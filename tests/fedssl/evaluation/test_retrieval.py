"""Retrieval by hand, against a slow transcription and against scikit-learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from fedssl.evaluation import retrieval
from fedssl.evaluation.features import Features
from fedssl.evaluation.protocol import evaluate
from fedssl.evaluation.retrieval import Retrieval, rank_classes
from fedssl.evaluation.scores import FRACTION, num_test_images
from tests.fedssl.evaluation.made import Given, blobs, results


def slow(data: Features, *, gallery: str) -> tuple[list[float], list[int]]:
    """Average precision and first rank of each query, one pair of images at a time in float64."""
    queries = [(row.double().numpy(), int(label)) for row, label in zip(data.test, data.test_labels, strict=True)]
    train = [(row.double().numpy(), int(label)) for row, label in zip(data.train, data.train_labels, strict=True)]
    precisions, ranks = [], []
    for number, (query, label) in enumerate(queries):
        images = train if gallery == "train" else queries[:number] + queries[number + 1 :]
        pairs = [
            (float(query @ row / np.linalg.norm(query) / np.linalg.norm(row)), other == label) for row, other in images
        ]
        own = [cosine for cosine, relevant in pairs if relevant]
        if not own:
            continue
        precisions.append(
            sum(sum(s >= cosine for s in own) / sum(s >= cosine for s, _ in pairs) for cosine in own) / len(own)
        )
        ranks.append(1 + sum(not relevant and cosine >= max(own) for cosine, relevant in pairs))
    return precisions, ranks


@pytest.mark.parametrize("gallery", ["test", "train"])
def test_retrieval_equals_the_slow_loop(gallery: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retrieval, "_SIMILARITIES", 200 * 7)  # several blocks per class
    data = blobs(spread=4.0)
    precisions, ranks = slow(data, gallery=gallery)
    result = results(Retrieval(gallery=gallery, recall_at=[1, 3]), data, seed=0)
    assert result["retrieval_map"] == pytest.approx(np.mean(precisions), abs=1e-6)
    assert 0.2 < result["recall_at_1"] < result["recall_at_3"] < 1
    assert [result[f"recall_at_{k}"] for k in (1, 3)] == [np.mean(np.array(ranks) <= k) for k in (1, 3)]


def test_average_precision_equals_scikit_learn_with_equal_cosines():
    data = blobs()
    generator = torch.Generator().manual_seed(1)
    queries, bank = (torch.randint(-1, 2, (40, 3), generator=generator).float() for _ in range(2))  # few directions
    labels, known = data.test_labels[:40], data.train_labels[:40]
    precision, _ = rank_classes(queries, labels, bank, known, same=False)
    cosines = torch.nn.functional.normalize(queries, dim=1) @ torch.nn.functional.normalize(bank, dim=1).T
    expected = [average_precision_score(known == labels[row], cosines[row]) for row in labels.argsort(stable=True)]
    np.testing.assert_allclose(precision, expected, atol=1e-12)


def test_retrieval_by_hand():
    # Angles in degrees and classes: 0 a, 10 b, 30 a, 90 b, 200 c. The gallery of 0 a is 10 b, 30 a, 90 b, 200 c: its
    # only a has rank 2, AP 1/2. Of 30 a: 10 b, 0 a, ...: 1/2. Of 10 b: 0 a, 30 a, 90 b: 1/3. Of 90 b: 30 a, 10 b: 1/2.
    # No other image is of class c.
    angles = torch.tensor([0.0, 10.0, 30.0, 90.0, 200.0]).deg2rad()
    features, labels = torch.stack([angles.cos(), angles.sin()], dim=1), torch.tensor([0, 1, 0, 1, 2])
    data = Features(features, labels, features * torch.arange(1, 6)[:, None], labels, num_classes=3)
    assert results(Retrieval(recall_at=[1, 2, 3]), data, seed=0) == {
        "retrieval_map": pytest.approx((1 / 2 + 1 / 2 + 1 / 3 + 1 / 2) / 4),
        "recall_at_1": 0,
        "recall_at_2": 3 / 4,
        "recall_at_3": 1,
    }
    # In the gallery of training images every query finds itself first.
    everything = results(Retrieval(gallery="train", recall_at=[1]), data, seed=0)
    assert everything["recall_at_1"] == 1


def test_retrieval_does_not_depend_on_the_order():
    data, order = blobs(spread=4.0), torch.randperm(200, generator=torch.Generator().manual_seed(0))
    shuffled = replace(data, test=data.test[order], test_labels=data.test_labels[order])
    assert results(Retrieval(), shuffled, seed=0) == pytest.approx(results(Retrieval(), data, seed=0))


def test_equal_features_find_nothing():
    # All cosines are equal: the average precision is the share of the class, 49 of 199, and other classes rank first.
    data = replace(blobs(), test=torch.ones(200, 8))
    result = results(Retrieval(), data, seed=0)
    assert result == {"retrieval_map": pytest.approx(49 / 199), **{f"recall_at_{k}": 0 for k in (1, 5, 10)}}


def test_queries_without_a_match_are_reported(caplog: pytest.LogCaptureFixture):
    data = blobs(n=8)
    labels = torch.tensor([0, 0, 1, 1, 5, 6, 7, 1])
    queries = Given(replace(data, test_labels=labels))
    Retrieval().validate(queries, feature_dim=2)
    scores = evaluate(Retrieval(), queries, seed=0)
    assert num_test_images([scores]) == dict.fromkeys(Retrieval().result_units(4), 5)
    assert caplog.messages == [
        "3 of 8 test images are no queries of retrieval, because no other test image has their class"
    ]
    alone = Given(replace(data, test_labels=torch.arange(8)))
    assert Retrieval()(alone, seed=0) == {}
    reason = "no other test image has the class of a test image"
    assert Retrieval(recall_at=[]).left_out(alone) == {"retrieval_map": reason}
    assert Retrieval().result_units(4)["recall_at_5"] == FRACTION
