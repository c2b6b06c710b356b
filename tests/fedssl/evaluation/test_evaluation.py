"""Evaluation protocols against slow transcriptions and hand-computed numbers, and the command around them."""

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from fedssl.config import compose
from fedssl.encoders import conv_small
from fedssl.errors import InputError
from fedssl.evaluation import cli, knn
from fedssl.evaluation.features import Features, extract, pixels
from fedssl.evaluation.few_labels import FewLabels, center_and_scale, draw_few
from fedssl.evaluation.knn import KNN, knn_predict
from fedssl.evaluation.linear import Linear, linear_probe, softmax_regression, standardise
from fedssl.evaluation.probes import Evaluation, Probes, evaluate
from fedssl.evaluation.scores import Score, as_numbers, as_scores, heading, over_models, units_of
from fedssl.evaluation.subject import Labelled, Subject
from fedssl.export import save_encoder
from fedssl.seeding import numpy_generator


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The data here are tiny: threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def blobs(seed: int = 0, *, n: int = 200, dim: int = 8, classes: int = 4, spread: float = 2.0) -> Features:
    """Overlapping Gaussian classes with strongly correlated features."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, dim, generator=generator)
    mixing = torch.randn(dim, dim, generator=generator) * torch.logspace(0, -2, dim)

    def sample(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % classes
        noise = torch.randn(count, dim, generator=generator)
        return (centers[labels] + spread * noise) @ mixing + 3, labels

    return Features(*sample(n), *sample(n), num_classes=classes)


class Given(Subject):
    """A subject whose features are there already."""

    def __init__(self, data: Features) -> None:
        test = torch.zeros(len(data.test), 1, 2, 2, dtype=torch.uint8)
        train = torch.zeros(len(data.train), 1, 2, 2, dtype=torch.uint8)
        super().__init__(
            encoder=None,
            train=Labelled(train, data.train_labels),
            test=Labelled(test, data.test_labels),
            mean=(0.5,),
            std=(0.5,),
            device=torch.device("cpu"),
        )
        self.__dict__["features"] = data


def results(protocol: Evaluation, data: Features, *, seed: int) -> dict[str, float]:
    """As files have them."""
    return as_numbers(evaluate(protocol, Given(data), seed=seed))


# --- features ---


class Statistics(nn.Module):
    """Flattens and normalises by batch norm, with a second module to tell modes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.norm.running_mean.fill_(1.0)
        self.norm.running_var.fill_(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(x.flatten(1)))


def test_extract_normalises_and_uses_running_statistics():
    # Pixel 255 -> 1 -> (1 - 0.5) / 0.1 = 5 -> (5 - 1) / sqrt(4) = 2; pixel 0 -> -5 -> -3.
    images = torch.tensor([[255, 0], [0, 255]], dtype=torch.uint8).view(2, 1, 1, 2)
    features = extract(Statistics(), images, mean=[0.5], std=[0.1], device="cpu")
    torch.testing.assert_close(features, torch.tensor([[2.0, -3.0], [-3.0, 2.0]]), rtol=1e-5, atol=1e-5)


def test_extract_leaves_modes_and_statistics_as_they_were():
    encoder = Statistics().train()
    encoder.norm.eval()  # a layer that is kept frozen during training
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    features = extract(encoder, torch.zeros(3, 1, 1, 2, dtype=torch.uint8), mean=[0.5], std=[0.1], device="cpu")
    assert (encoder.training, encoder.norm.training, encoder.dropout.training) == (True, False, True)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert not features.is_inference()
    assert not features.requires_grad


def test_extract_restores_modes_after_an_error():
    encoder = Statistics().train()
    with pytest.raises(RuntimeError):
        extract(encoder, torch.zeros(3, 1, 2, 2, dtype=torch.uint8), mean=[0.5], std=[0.1], device="cpu")
    assert encoder.training


def test_extract_normalises_each_channel_and_does_not_depend_on_the_batch_size():
    images = torch.randint(0, 256, (7, 3, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    expected = (images.double() / 255 - torch.tensor(mean).double().view(3, 1, 1)) / torch.tensor(std).double().view(
        3, 1, 1
    )
    for batch_size in (2, 7, 100):
        found = extract(nn.Flatten(), images, mean=mean, std=std, device="cpu", batch_size=batch_size)
        torch.testing.assert_close(found.double(), expected.flatten(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((1, 8, 8), 64),
        ((3, 32, 32), 3072),
        ((3, 64, 64), 3072),
        ((3, 96, 96), 3072),
        ((1, 64, 64), 1024),
        ((3, 33, 33), 867),  # squares of 2, cut at the border: 17 x 17 of them
    ],
)
def test_pixels_have_at_most_3072_values(shape: tuple[int, int, int], dim: int):
    assert pixels(torch.zeros(2, *shape, dtype=torch.uint8)).shape == (2, dim)


def test_pixels_are_averaged_over_squares():
    image = torch.zeros(1, 1, 57, 57, dtype=torch.uint8)  # 57 * 57 > 3072: squares of 2, the last of width 1
    image[0, 0, :2, :2] = torch.tensor([[255, 0], [0, 51]])
    image[0, 0, 56, 56] = 255
    found = pixels(image).view(29, 29)
    assert found[0, 0].item() == pytest.approx((1 + 0.2) / 4)
    assert found[28, 28].item() == pytest.approx(1.0)
    assert found.sum().item() == pytest.approx(1.3)
    small = torch.tensor([[0, 51], [102, 255]], dtype=torch.uint8).view(1, 1, 2, 2)
    torch.testing.assert_close(pixels(small), torch.tensor([[0.0, 0.2, 0.4, 1.0]]))


def test_features_that_are_not_finite_are_refused():
    data = blobs()
    data.test[3, 1] = math.nan
    with pytest.raises(InputError, match="diverged"):
        Features(data.train, data.train_labels, data.test, data.test_labels, data.num_classes)


# --- kNN ---


def slow_knn(data: Features, *, k: int, temperature: float) -> list[int]:
    """Wu et al. 2018, section 3.4, one test picture and one neighbour at a time in float64."""
    train, test = data.train.double().numpy(), data.test.double().numpy()
    predictions = []
    for query in test:
        cosines = [float(query @ row / np.linalg.norm(query) / np.linalg.norm(row)) for row in train]
        votes = [0.0] * data.num_classes
        for index in sorted(range(len(train)), key=lambda i: -cosines[i])[:k]:
            votes[int(data.train_labels[index])] += math.exp(cosines[index] / temperature)
        predictions.append(max(range(data.num_classes), key=votes.__getitem__))
    return predictions


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (20, 0.1), (20, 1.0), (200, 0.07), (1000, 0.1)])
def test_knn_equals_the_slow_loop(k: int, temperature: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(knn, "_SIMILARITIES", 200 * 30)  # several blocks, the last one smaller
    data = blobs()
    found = knn_predict(
        data.train, data.train_labels, data.test, num_classes=data.num_classes, k=k, temperature=temperature
    )
    assert found.tolist() == slow_knn(data, k=k, temperature=temperature)


def test_knn_by_hand():
    # Cosines with the query (1, 0): 1 (class 0), 0.8 and 0.8 (class 1), 0 (class 0).
    train = torch.tensor([[2.0, 0.0], [0.8, 0.6], [4.0, -3.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 1, 0])
    query = torch.tensor([[5.0, 0.0]])

    def predict(k: int, temperature: float) -> int:
        return knn_predict(train, labels, query, num_classes=2, k=k, temperature=temperature).item()

    assert predict(1, 0.1) == 0
    # k = 3, temperature 0.1: class 0 e^10 = 22026, class 1 2 e^8 = 5962.
    assert predict(3, 0.1) == 0
    # Temperature 1: class 0 e = 2.72, class 1 2 e^0.8 = 4.45; with the fourth, class 0 e + 1 = 3.72.
    assert predict(3, 1.0) == 1
    assert predict(4, 1.0) == 1
    # Temperature 10: class 0 e^0.1 + 1 = 2.105, class 1 2 e^0.08 = 2.167.
    assert predict(200, 10.0) == 1


def test_knn_with_a_tiny_temperature_is_the_nearest_neighbour():
    data = blobs()

    def predict(k: int, temperature: float) -> Tensor:
        return knn_predict(data.train, data.train_labels, data.test, num_classes=4, k=k, temperature=temperature)

    assert torch.equal(predict(50, 1e-6), predict(1, 0.1))


def test_knn_counts_only_directions():
    data = blobs()
    lengths = torch.rand(len(data.train), 1) * 10 + 0.1
    scaled = Features(data.train * lengths, data.train_labels, data.test * 7, data.test_labels, data.num_classes)
    assert results(KNN(), scaled, seed=0) == results(KNN(), data, seed=0)


def test_knn_accuracy_is_a_share():
    train = torch.eye(2)
    data = Features(train, torch.tensor([0, 1]), train[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 0]), num_classes=2)
    assert results(KNN(k=1), data, seed=0) == {"knn": 0.75}


# --- linear ---


def test_softmax_regression_by_hand():
    # x = -1 (class 0) and x = 1 (class 1). By symmetry the weight is (-a, a) and the bias 0, and the loss is
    # log(1 + e^(-2a)) + l2 a^2, whose derivative is 0 where l2 a = 1 / (1 + e^(2a)): a = 1 for l2 = 1 / (1 + e^2).
    x, labels = torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1])
    weight, bias = softmax_regression(x, labels, num_classes=2, l2=1 / (1 + math.exp(2)))
    torch.testing.assert_close(weight, torch.tensor([[-1.0, 1.0]]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(bias, torch.zeros(2), rtol=0, atol=1e-3)


@pytest.mark.parametrize("n", [200, 8, 6], ids=["more pictures than features", "as many", "fewer"])
@pytest.mark.parametrize("l2", [1e-1, 1e-3])
def test_softmax_regression_equals_scikit_learn(n: int, l2: float):
    data = blobs(n=n)
    x, x_test = standardise(data.train, data.test)
    weight, bias = softmax_regression(x, data.train_labels, num_classes=4, l2=l2)
    # scikit-learn minimises C * sum of losses + ||weight||^2 / 2.
    reference = LogisticRegression(C=1 / (n * l2), tol=1e-10, max_iter=20_000).fit(
        x.double().numpy(), data.train_labels.numpy()
    )
    found = torch.addmm(bias, x_test, weight).softmax(1).double().numpy()
    np.testing.assert_allclose(found, reference.predict_proba(x_test.double().numpy()), atol=5e-3)


def test_linear_probe_equals_scikit_learn():
    data = blobs()
    scaler = StandardScaler().fit(data.train.double().numpy())
    reference = LogisticRegression(C=1 / (200 * 1e-2), tol=1e-10, max_iter=20_000)
    reference.fit(scaler.transform(data.train.double().numpy()), data.train_labels.numpy())
    found = linear_probe(data.train, data.train_labels, data.test, num_classes=4, l2=1e-2)
    expected = reference.predict(scaler.transform(data.test.double().numpy()))
    assert (found.numpy() == expected).mean() >= 0.99  # a test picture on a boundary may fall to either side


def test_linear_separates_what_can_be_separated():
    data = blobs(spread=0.01)
    assert results(Linear(), data, seed=0) == {"linear": 1.0}
    assert results(Linear(l2=0.0), data, seed=0) == {"linear": 1.0}


def test_linear_gives_the_same_number_every_time_whatever_the_seed():
    data = blobs()
    assert results(Linear(), data, seed=0) == results(Linear(), data, seed=1)


def test_linear_ignores_shift_and_scale_of_features():
    data = blobs()
    scale = torch.logspace(-3, 3, 8)
    other = Features(data.train * scale - 5, data.train_labels, data.test * scale - 5, data.test_labels, 4)
    found = results(Linear(), other, seed=0)["linear"]
    assert found == pytest.approx(results(Linear(), data, seed=0)["linear"], abs=0.01)


def test_standardise_leaves_a_constant_feature_at_zero():
    train = torch.tensor([[0.1, 1.0], [0.1, 3.0], [0.1, 5.0]])
    x, x_test = standardise(train, torch.tensor([[0.4, 3.0]]))
    # Deviation of 1, 3, 5 with divisor n: sqrt(8 / 3).
    torch.testing.assert_close(x[:, 1], torch.tensor([-1.0, 0.0, 1.0]) * 2 / math.sqrt(8 / 3))
    torch.testing.assert_close(x[:, 0], torch.zeros(3), rtol=0, atol=1e-6)
    torch.testing.assert_close(x_test, torch.tensor([[0.3, 0.0]]))


@pytest.mark.parametrize("protocol", [KNN(), Linear(), Linear(l2=0.0), FewLabels(draws=2)])
def test_a_collapsed_encoder_is_at_chance(protocol: KNN | Linear | FewLabels):
    labels = torch.arange(40) % 4
    data = Features(torch.full((40, 8), 0.3), labels, torch.full((40, 8), 0.3), labels, num_classes=4)
    found = protocol(Given(data), seed=0)
    assert [score.value for score in found.values()] == [0.25] * (2 if isinstance(protocol, FewLabels) else 1)


# --- few labels ---


def test_draw_few_takes_the_same_number_of_every_class():
    labels = torch.tensor([2, 0, 1, 0, 2, 1, 0, 0, 1, 2])
    drawn = draw_few(labels, per_class=3, num_classes=3, generator=np.random.default_rng(0))
    assert labels[drawn].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(set(drawn.tolist())) == 9


def test_draw_few_reaches_every_picture():
    labels = torch.tensor([0, 0, 0, 1])
    generator = np.random.default_rng(0)
    drawn = [draw_few(labels, per_class=1, num_classes=2, generator=generator).tolist() for _ in range(100)]
    assert {first for first, _ in drawn} == {0, 1, 2}
    assert {second for _, second in drawn} == {3}


def test_draw_few_names_the_class_that_is_too_small():
    with pytest.raises(InputError, match=r"labels_per_class=2 but class 1 has 1 labelled training pictures"):
        draw_few(torch.tensor([0, 0, 1]), per_class=2, num_classes=2, generator=np.random.default_rng(0))
    with pytest.raises(InputError, match=r"class 2 has 0"):
        draw_few(torch.tensor([0, 0, 1]), per_class=1, num_classes=3, generator=np.random.default_rng(0))


def test_center_and_scale_by_hand():
    # Centre (1, 2); squared distances 1 + 4 = 5 each, so the scale is sqrt(5).
    train, test = center_and_scale(torch.tensor([[0.0, 0.0], [2.0, 4.0]]), torch.tensor([[1.0, 7.0]]))
    torch.testing.assert_close(train, torch.tensor([[-1.0, -2.0], [1.0, 2.0]]) / math.sqrt(5))
    torch.testing.assert_close(test, torch.tensor([[0.0, 5.0]]) / math.sqrt(5))


def test_few_labels_by_hand():
    # One feature; class 0 is at 0 and 10, class 1 at 4. With one picture per class the boundary is half-way:
    # at 2 if the picture at 0 is drawn (the test pictures 0, 1, 4 are right, 10 is not: 3/4),
    # at 7 if the picture at 10 is drawn (4 and 10 are right: 2/4).
    train, labels = torch.tensor([[0.0], [10.0], [4.0]]), torch.tensor([0, 0, 1])
    test, test_labels = torch.tensor([[0.0], [1.0], [4.0], [10.0]]), torch.tensor([0, 0, 1, 0])
    data = Features(train, labels, test, test_labels, num_classes=2)
    expected = []
    for draw in range(6):
        generator = numpy_generator(5, "few labels", 1, draw)
        first = draw_few(labels, per_class=1, num_classes=2, generator=generator)[0].item()
        expected.append(0.75 if first == 0 else 0.5)
    assert len(set(expected)) == 2
    assert results(FewLabels(labels_per_class=[1], draws=6), data, seed=5) == {
        "linear_1_per_class": pytest.approx(np.mean(expected)),
        "linear_1_per_class_std": pytest.approx(np.std(expected, ddof=1)),
    }
    assert results(FewLabels(labels_per_class=[1], draws=1), data, seed=5) == {"linear_1_per_class": expected[0]}


def test_few_labels_draws_the_same_pictures_for_every_representation():
    # The probe does not change when features are rotated and scaled, so two representations that differ by that
    # give the same accuracies, in the mean and in the spread, if and only if the draws are the same.
    data = blobs(n=400)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
    rotated = Features(
        data.train @ rotation * 50, data.train_labels, data.test @ rotation * 50, data.test_labels, data.num_classes
    )
    protocol = FewLabels(draws=4)
    found = results(protocol, data, seed=3)
    assert found == results(protocol, data, seed=3)
    assert results(protocol, rotated, seed=3) == pytest.approx(found, abs=0.004)
    assert abs(results(protocol, rotated, seed=4)["linear_2_per_class"] - found["linear_2_per_class"]) > 0.004


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("protocol", [KNN(), Linear(), FewLabels(draws=2)])
def test_features_may_be_on_the_gpu(protocol: KNN | Linear | FewLabels):
    data = blobs()
    on_gpu = Features(data.train.cuda(), data.train_labels, data.test.cuda(), data.test_labels, data.num_classes)
    assert results(protocol, on_gpu, seed=0) == pytest.approx(results(protocol, data, seed=0), abs=0.01)


# --- subjects ---


class Counting(nn.Flatten):
    """Counts how often pictures come."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().forward(x)


def subject(encoder: nn.Module | None) -> Subject:
    """Pictures of 1 x 2 pixels: class 0 is bright on the left, class 1 on the right."""
    images = torch.tensor([[255, 0], [0, 255], [204, 51], [51, 204]], dtype=torch.uint8).view(4, 1, 1, 2)
    labels = torch.tensor([0, 1, 0, 1])
    some = {"train": Labelled(images, labels), "test": Labelled(images[:3], labels[:3])}
    return Subject(encoder=encoder, **some, mean=(0.5,), std=(0.1,), device=torch.device("cpu"))


def test_features_are_computed_once_for_all_protocols():
    encoder = Counting()
    probes = Probes(protocols={"a": KNN(), "b": Linear(), "c": FewLabels(labels_per_class=[1])})
    assert len(probes(subject(encoder), seed=0)) == 3
    assert encoder.seen == 4 + 3


def test_features_of_an_encoder_and_raw_pixels():
    # Pixel 51 -> 0.2 -> (0.2 - 0.5) / 0.1 = -3.
    features = subject(nn.Flatten()).features
    torch.testing.assert_close(features.train[2:], torch.tensor([[3.0, -3.0], [-3.0, 3.0]]))
    assert features.test.shape == (3, 2)
    assert features.num_classes == 2
    torch.testing.assert_close(subject(None).features.train[2:], torch.tensor([[0.8, 0.2], [0.2, 0.8]]))


class FineTuned:
    """A protocol that trains a copy of the encoder: no features, the pictures themselves."""

    def __call__(self, subject: Subject, *, seed: int) -> Mapping[str, Score | float]:
        if subject.encoder is None:
            return {}
        network = nn.Sequential(copy.deepcopy(subject.encoder), nn.LazyLinear(subject.num_classes)).train()
        images = (subject.train.images.float() / 255 - subject.mean[0]) / subject.std[0]
        network(images)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images), subject.train.labels)
            loss.backward()
            optimizer.step()
        return {"fine_tuned_loss": Score(loss.item(), "nats"), "steps": Score(20, ""), "fine_tuned": 1.0}


def test_a_protocol_may_train_the_encoder():
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    before = copy.deepcopy(encoder.state_dict())
    torch.manual_seed(0)
    found = evaluate(FineTuned(), subject(encoder), seed=0)
    assert found["fine_tuned_loss"].value < 0.1
    assert units_of(found) == {"fine_tuned_loss": "nats", "steps": "", "fine_tuned": "accuracy"}
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert evaluate(FineTuned(), subject(None), seed=0) == {}


# --- scores ---


def test_scores_come_back_from_files_as_they_were():
    scores = {
        "knn": Score(0.5),
        "few": Score(0.25, spread=0.1),
        "loss": Score(2.5, "nats", 0.5),
        "epochs": Score(3, ""),
    }
    numbers, units = as_numbers(scores), units_of(scores)
    assert numbers == {"knn": 0.5, "few": 0.25, "few_std": 0.1, "loss": 2.5, "loss_std": 0.5, "epochs": 3}
    assert units == {"knn": "accuracy", "few": "accuracy", "loss": "nats", "epochs": ""}
    assert as_scores(json.loads(json.dumps(numbers)), units) == scores
    assert as_scores(scores) == scores


def test_plain_numbers_are_accuracies():
    found = as_scores({"mine": 0.5, "mine_std": 0.1, "low_std": 0.2, "loss": Score(1.0, "nats")})
    assert found == {"mine": Score(0.5, "accuracy", 0.1), "low_std": Score(0.2), "loss": Score(1.0, "nats")}


def test_scores_for_people():
    assert [Score(0.6134).text, Score(0.5, spread=0.05).text] == ["61.3%", "50.0 ± 5.0%"]
    assert [Score(2.34567, "nats").text, Score(12345.678, "", 1.5).text] == ["2.346 nats", "1.235e+04 ± 1.5"]
    assert [heading("knn", "accuracy"), heading("loss", "nats"), heading("k", "")] == ["knn (%)", "loss (nats)", "k"]


def test_results_over_models_are_means_and_deviations():
    found = over_models([{"few": Score(0.2, spread=0.01), "l": Score(1, "m")}, {"few": Score(0.6), "l": Score(3, "m")}])
    # Deviations from the means 0.4 and 2 are 0.2 and 1; with divisor 2 - 1 they give 0.2 * sqrt 2 and sqrt 2.
    few, length = found["few"], found["l"]
    assert (few.value, few.spread, few.unit) == (pytest.approx(0.4), pytest.approx(0.2 * math.sqrt(2)), "accuracy")
    assert (length.value, length.spread, length.unit) == (2, pytest.approx(math.sqrt(2)), "m")
    assert over_models([{"few": Score(0.2, spread=0.01)}]) == {"few": Score(0.2, spread=0.01)}
    assert over_models([{}, {}]) == {}


# --- settings ---


@pytest.mark.parametrize("slot", ["evaluation", "final_evaluation", "evaluation@final_evaluation"])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("none", set()),
        ("knn", {"knn"}),
        ("linear", {"linear"}),
        ("few_labels", {f"linear_{n}_per_class{ending}" for n in (2, 5) for ending in ("", "_std")}),
        ("semi_supervised", {f"linear_{n}_percent{ending}" for n in (1, 10) for ending in ("", "_std")}),
        (
            "probes",
            {"knn", "linear", *(f"linear_{n}_per_class{ending}" for n in (2, 5) for ending in ("", "_std"))},
        ),
    ],
)
def test_every_yaml_serves_in_both_places(slot: str, name: str, keys: set[str]):
    settings = compose([f"{slot}={name}"]).evaluation
    component = settings.protocol if slot == "evaluation" else settings.final_protocol
    assert set(results(component.make(), blobs(), seed=0)) == keys


def test_probes_merge_their_results():
    subject = Given(blobs())
    merged = Probes(protocols={"a": KNN(), "b": Linear()})(subject, seed=0)
    assert merged == {**KNN()(subject, seed=0), **Linear()(subject, seed=0)}


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        (KNN, {"k": 0}),
        (KNN, {"temperature": 0.0}),
        (KNN, {"temperature": -1.0}),
        (Linear, {"l2": -1.0}),
        (Linear, {"max_iterations": 0}),
        (FewLabels, {"labels_per_class": []}),
        (FewLabels, {"labels_per_class": [0, 5]}),
        (FewLabels, {"draws": 0}),
        (FewLabels, {"l2": math.nan}),
    ],
)
def test_bad_settings_are_refused_by_name(protocol: type, settings: dict[str, object]):
    (name, value) = next(iter(settings.items()))
    with pytest.raises(InputError, match=re.escape(f"{name}={value}")):
        protocol(**settings)


# --- the command ---


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    """A run folder as far as the command needs it: settings and encoder of a run on the digits."""
    settings = compose(["seed=7", "dataset=digits", "dataset.limit=300", "encoder=conv_small", "encoder.width=4"])
    (tmp_path / "config.yaml").write_text(settings.recording.text)
    write_encoder(tmp_path / "encoder.pt")
    return tmp_path


def write_encoder(file: Path, *, channels: int = 1, size: int = 8) -> None:
    torch.manual_seed(0)
    settings = {"_target_": "fedssl.encoders.conv_small", "channels": channels, "size": size, "width": 4}
    encoder = conv_small(channels=channels, size=size, width=4)
    save_encoder(file, encoder, settings=settings, mean=[0.3] * channels, std=[0.4] * channels, metadata={})


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["fedssl-evaluate", *words])
    monkeypatch.setattr(cli.torch, "set_num_threads", lambda threads: None)
    return cli.main()


def test_command_evaluates_a_run_on_its_own_data(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert command(monkeypatch, f"run={finished_run}", "evaluation.k=20") == 0
    report = json.loads((finished_run / "evaluation" / "knn-digits.json").read_text())
    assert report["pictures"]["train"] == 300
    assert report["seed"] == 7
    assert report["evaluation"]["k"] == 20
    assert report["units"] == {"knn": "accuracy"}
    assert 0.3 < report["results"]["knn"] < 1  # an untrained encoder is far from chance
    output = capsys.readouterr().out
    assert f"{100 * report['results']['knn']:.1f}" in output
    assert str(finished_run / "evaluation" / "knn-digits.json") in output


def test_command_evaluates_under_all_protocols_with_changed_data(finished_run: Path, monkeypatch: pytest.MonkeyPatch):
    words = [f"run={finished_run}", "evaluation=probes", "evaluation.protocols.few_labels.draws=2", "seed=1"]
    assert command(monkeypatch, *words, "dataset.limit=200", "dataset.test_limit=50") == 0
    report = json.loads((finished_run / "evaluation" / "probes-digits.json").read_text())
    assert report["pictures"] == {"train": 200, "test": 50}
    assert report["seed"] == 1
    assert {"knn", "linear", "linear_2_per_class", "linear_5_per_class_std"} <= set(report["results"])


def test_command_writes_a_paper_s_probe_beside_the_others(finished_run: Path, monkeypatch: pytest.MonkeyPatch):
    words = [f"run={finished_run}", "evaluation=fedu/linear", "evaluation.epochs=2", "dataset.test_limit=50"]
    assert command(monkeypatch, *words) == 0
    report = json.loads((finished_run / "evaluation" / "fedu_linear-digits.json").read_text())
    assert list(report["results"]) == ["linear_fedu"]


def test_command_standardises_and_scales_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_encoder(tmp_path / "encoder.pt", channels=3, size=16)
    words = [f"encoder={tmp_path / 'encoder.pt'}", "dataset=digits", "dataset.limit=100"]
    assert command(monkeypatch, *words, "dataset.channels=3") == 0
    report = json.loads((tmp_path / "evaluation" / "knn-digits.json").read_text())
    assert report["dataset"]["size"] == 16
    assert report["dataset"]["mean"] == [0.3] * 3
    assert report["dataset"]["std"] == [0.4] * 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either run=DIR"),
        (["run={run}", "encoder={run}/encoder.pt"], "give either run=DIR"),
        (["run={run}/nowhere"], "there is no .*encoder.pt; give the folder"),
        (["encoder={run}/encoder.pt"], "add dataset=NAME"),
        (["run={run}", "dataset.pth=x"], "dataset.pth=x does not fit the data set"),
        (["run={run}", "evaluation=kn"], "did you mean knn"),
        (["run={run}", "evaluation.k=0"], "k=0"),
        (["run={run}", "dataset=digits", "dataset.channels=3"], r"pictures with 1 channel\(s\) but dataset.channels=3"),
        (["run={run}", "dataset.splits={{federated: train, train: train, test: null}}"], "no labelled test pictures"),
        (["run={run}", "evaluation=few_labels", "dataset.limit=12"], "labels_per_class=2 but class"),
    ],
)
def test_command_answers_bad_input_with_one_sentence(
    words: list[str],
    message: str,
    finished_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    status = command(monkeypatch, *(word.format(run=finished_run) for word in words or ["evaluation=knn"]))
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err)


def test_command_tells_an_unfinished_run_from_a_wrong_folder(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (finished_run / "encoder.pt").unlink()
    assert command(monkeypatch, f"run={finished_run}") == 2
    assert f"fedssl resume={finished_run}" in capsys.readouterr().err


def test_command_names_the_encoders_of_a_run_that_has_several(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for client in (0, 1):
        (finished_run / f"encoder-{client}.pt").write_bytes((finished_run / "encoder.pt").read_bytes())
    (finished_run / "encoder.pt").unlink()
    assert command(monkeypatch, f"run={finished_run}") == 2
    assert f"has 2 encoders; give one of them: encoder={finished_run}/encoder-0.pt" in capsys.readouterr().err


def test_command_without_words_shows_its_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert command(monkeypatch) == 2
    assert command(monkeypatch, "--help") == 0
    assert capsys.readouterr().out.count("usage:") == 2
