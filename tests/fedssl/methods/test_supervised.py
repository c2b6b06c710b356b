"""Supervised training: the loss, labels that go with their images, refusals, and the classifier's own accuracy."""

import math

import pytest
import torch
from PIL import Image
from torch import nn

from fedssl.config.load import compose
from fedssl.datasets.base import NO_LABEL, load_split
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.evaluation.features import extract
from fedssl.methods.base import SSLMethod, build_method
from fedssl.methods.supervised import Supervised
from fedssl.model_arrays import load_layers
from fedssl.seeding import torch_generator
from fedssl.training import train
from fedssl.views import Views
from server_app.checkpoint import latest_checkpoint
from simulation.run import run
from tests.encoders import LinearEncoder
from tests.local_training import local_training
from tests.runs import read_lines, read_summary

QUICK = ["method=supervised", "num_clients=3", "rounds=2", "local_epochs=1", "dataset.limit=60", "encoder.width=4"]


class Flat(nn.Flatten):
    """Images as they are."""

    feature_dim = 2


def images(*rows):
    return torch.tensor(rows, dtype=torch.float32).reshape(len(rows), 1, 1, 2)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_loss_is_the_mean_cross_entropy_of_all_views(number):
    generator = torch.Generator().manual_seed(0)
    method = Supervised(Flat(), num_classes=3)
    views = [torch.randn(4, 1, 1, 2, generator=generator) for _ in range(number)]
    labels = torch.tensor([2, 0, 1, 2])
    weight, bias = method.classifier.weight.double(), method.classifier.bias.double()
    expected = []
    for view in views:
        for x, label in zip(view.double().flatten(1), labels, strict=True):
            logits = [float(w @ x + b) for w, b in zip(weight, bias, strict=True)]
            expected.append(math.log(sum(math.exp(logit) for logit in logits)) - logits[label])
    mean = sum(expected) / (4 * number)
    assert method.loss(Views.of(*views, labels=labels)).item() == pytest.approx(mean, rel=1e-6)


def test_a_run_with_one_view(tmp_path):
    run([*QUICK, "augmentation=none", "augmentation.views=[{}]", "final_evaluation=none", f"output_dir={tmp_path}"])
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["clients"] for line in lines] == [3, 3]
    assert all(line["model_cosine"] < 1 for line in lines)  # they train


def test_images_without_a_label_have_no_loss():
    method = Supervised(Flat(), num_classes=2)
    view1, view2 = images((1.0, 2.0), (3.0, -1.0), (0.5, 0.5)), images((0.0, 1.0), (2.0, 2.0), (1.0, 0.0))
    some = method.loss(Views.of(view1, view2, labels=torch.tensor([1, NO_LABEL, 0])))
    kept = torch.tensor([0, 2])
    alone = method.loss(Views.of(view1[kept], view2[kept], labels=torch.tensor([1, 0])))
    assert some.item() == pytest.approx(alone.item())
    none = method.loss(Views.of(view1, view2, labels=torch.full((3,), NO_LABEL)))
    none.backward()
    assert none.item() == 0
    assert not method.classifier.weight.grad.any()


def test_the_loss_by_hand():
    # Logits are the images. View 1 of class 0 is (log 3, 0): 3 / (3 + 1) of the softmax; view 2 is (0, 0): 1 / 2.
    method = Supervised(Flat(), num_classes=2)
    with torch.no_grad():
        method.classifier.weight.copy_(torch.eye(2))
        method.classifier.bias.zero_()
    loss = method.loss(Views.of(images([math.log(3), 0]), images([0, 0]), labels=torch.tensor([0])))
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2, rel=1e-6)


@pytest.mark.parametrize(("num_classes", "result"), [(None, "null"), (0, "0")])
def test_an_unknown_number_of_classes_is_refused(num_classes, result):
    with pytest.raises(InputError, match=rf"dataset.num_classes={result} .* set dataset.num_classes"):
        Supervised(Flat(), num_classes=num_classes)


class Recorded(SSLMethod):
    """Notes the value of each image with the label that came with it."""

    uses_labels = True

    def __init__(self):
        super().__init__()
        self.encoder = LinearEncoder([[1.0]])
        self.seen = []

    def loss(self, views):
        self.seen += list(zip(views[0].images.flatten().tolist(), views.labels.tolist(), strict=True))
        return self.encoder.weight.sum()


def test_every_image_comes_with_its_own_label():
    # Image v has label 3v; the client holds 1, 4, 5 and 8 of the ten.
    method = Recorded()
    train(
        method,
        TensorImages(torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1)),
        torch.tensor([1, 4, 5, 8]),
        training=local_training(torch.optim.SGD(method.parameters(), lr=0.1), epochs=2, batch_size=3),
        generator=torch_generator(0, "train"),
        labels=3 * torch.arange(10),
    )
    assert sorted(method.seen) == [(value, 3 * value) for value in (1, 1, 4, 4, 5, 5, 8, 8)]
    assert method.seen != sorted(method.seen)


def test_images_without_labels_are_refused_before_anything_is_written(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for shade in range(6):
        Image.new("L", (8, 8), color=40 * shade).save(folder / f"{shade}.png")
    overrides = ["dataset=folder", f"dataset.path={folder}", "dataset.num_classes=2", "partition=iid"]
    with pytest.raises(InputError, match=r"Supervised needs labels .* dataset.splits.federated=train have none"):
        run([*QUICK, *overrides, f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_images_without_labels_do_not_count(tmp_path):
    """Three clients have 8 images each, and 8, 2 and 0 labels; the last one never trains."""
    lines = ["image,label,site"]
    for site, labels in enumerate(("abababab", "ab", "")):
        for number in range(8):
            Image.new("L", (8, 8), color=30 * number).save(tmp_path / f"{site}{number}.png")
            lines.append(f"{site}{number}.png,{labels[number : number + 1]},{site}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    own = ["dataset=folder", f"dataset.path={tmp_path / 'list.csv'}", "dataset.owner=site", "partition=natural"]
    own += ["dataset.num_classes=2", "dataset.test_fraction=0", "strategy=fedavg", "dataset.limit=null"]
    run([*QUICK, *own, "rounds=1", "evaluate_every=0", "final_evaluation=none", f"output_dir={tmp_path / 'run'}"])
    rows = read_lines(tmp_path / "run" / "clients.jsonl")
    assert sorted((row["examples"], row["loss"] > 0.1) for row in rows) == [(2, True), (8, True)]
    assert read_summary(tmp_path / "run")["clients_with_few_images"] == 1
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[0]["dropped"] == {}


def test_the_final_comparison_has_the_accuracy_of_the_classifier(tmp_path):
    overrides = [*QUICK, "threads=1", "evaluate_every=0", "final_evaluation=knn"]
    run([*overrides, f"output_dir={tmp_path}"])
    final = read_summary(tmp_path)["final"]
    settings = compose(overrides)
    method, test = build_method(settings.model), load_split(settings.data, "test")
    load_layers(method, latest_checkpoint(tmp_path / "checkpoints").models["global"].layers)
    h = extract(method.encoder, test.images, mean=settings.data.mean, std=settings.data.std, device="cpu")
    best = (h @ method.classifier.weight.T + method.classifier.bias).argmax(dim=1)
    right = int((best == test.labels).sum())
    assert final["federated"]["classifier"] == pytest.approx(right / len(test.labels))
    assert "classifier" in final["untrained"]
    assert "classifier" not in final["pixels"]
