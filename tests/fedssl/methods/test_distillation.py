"""Distillation: its loss slowly, the queue, what travels, what devices receive, and whole runs."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor

from client_app.worker import release_worker
from fedssl.config.device_task import compose_task, make_task
from fedssl.config.load import compose, parse_client_config
from fedssl.config.typed_settings import training_components
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.losses import feature_mse, similarity_distillation, teacher_distance
from fedssl.methods import teacher as teacher_module
from fedssl.methods.base import build_method
from fedssl.methods.distillation import Distillation
from fedssl.model_arrays import exchanged_names, local_names, names_in_parts
from fedssl.seeding import torch_generator
from fedssl.training import LocalTrainer, train
from fedssl.views import Views
from fedssl.wire.messages import CONFIG
from server_app.build import build_run
from server_app.checkpoint import latest_checkpoint
from server_app.initial_weights import load_teacher
from server_app.round import Round
from simulation.run import run
from strategies.types import GLOBAL, ServerState
from tests.arrays import same
from tests.devices import FORM, Devices, ask, context, write_images
from tests.federation import Federation, finish
from tests.methods import overrides_of, save_teacher, teacher_file
from tests.resuming import repeat_from
from tests.runs import read_lines

HOSTILE = {
    "a function": ({"encoder": "os.system"}, "method.teacher_encoder.encoder=os.system does not exist"),
    "a class": ({"_target_": "os.system"}, "method.teacher_encoder has the key '_target_'"),
    "large images": ({"size": 513}, "the teacher has images of 513 pixels but this device allows 512 at most"),
    "a large network": ({"width": 65_536}, "of memory but this device allows"),
    "large adapters": ({"adapters": {"bottleneck": 10**9, "blocks": 4}}, "adapters.bottleneck is beyond 65536"),
    "adapters of no stage": ({"adapters": {"bottleneck": 1, "blocks": 5}}, "the encoder has 4 stages"),
    "unknown adapters": ({"adapters": {"bottleneck": 1, "evil": 1}}, "does not describe an encoder"),
    "unknown settings": ({"evil": 1}, "rejects its settings"),
    "no statistics": ({"mean": []}, "method.teacher_encoder does not describe an encoder"),
    "a path": ({"encoder": "/etc/passwd"}, "InputError; see the log of the device"),
}


WORDS = [*overrides_of("distillation"), "encoder.width=4"]
SIMILARITY = ["method.loss=similarity", "method.queue_size=10"]
TEACHER_DIM = 24  # of the teacher's width of 6


def make_method(*overrides: str) -> Distillation:
    settings = compose([*WORDS, *overrides])
    method = build_method(settings.model)
    load_teacher(method, settings)
    assert isinstance(method, Distillation)
    return method


def batch(seed: int = 0, count: int = 6) -> Views:
    generator = torch.Generator().manual_seed(seed)
    images = [torch.randn(count, 1, 8, 8, generator=generator) for _ in range(2)]
    return Views(Views.of(*images).views, targets=torch.randn(count, TEACHER_DIM, generator=generator))


def slowly(method: Distillation, views: Views, queue: Tensor) -> Tensor:
    """The mean over both views, which share their batch normalization."""
    z = method.projector(method.encoder(torch.cat(views.images))).double()
    t = views.targets.double()
    if method.objective == "similarity":
        temperatures = {"student_temperature": 0.2, "teacher_temperature": 0.01}
        losses = [similarity_distillation(part, t, queue.double(), **temperatures) for part in z.chunk(2)]
    else:
        distance = {"cosine": teacher_distance, "mse": feature_mse}[method.objective]
        losses = [distance(part, t) for part in z.chunk(2)]
    return (losses[0] + losses[1]) / 2


@pytest.mark.parametrize("overrides", [["method.loss=cosine"], ["method.loss=mse"], SIMILARITY], ids=" ".join)
def test_the_loss_is_the_mean_over_views(overrides):
    method = make_method(*overrides)
    queue = torch.nn.functional.normalize(torch.randn(10, TEACHER_DIM, generator=torch_generator(0, "queue")), dim=1)
    if method.local_parts:
        method.queue.copy_(queue)
    views = batch()
    loss = method.loss(views)
    assert loss.item() == pytest.approx(slowly(method, views, queue).item(), rel=1e-5)
    loss.backward()
    trained = {name for name, weights in method.named_parameters() if weights.grad is not None and weights.grad.any()}
    assert {name.partition(".")[0] for name in trained} == {"encoder", "projector"}


def test_the_queue_has_normalized_features_newest_first():
    method = make_method(*SIMILARITY)
    first, second = batch(1), batch(2)
    method.loss(first)
    method.loss(second)
    unit = [torch.nn.functional.normalize(views.targets, dim=1) for views in (second, first)]
    torch.testing.assert_close(method.queue, torch.cat(unit)[:10])
    method.start_round(first=False)
    assert method.queue.any()
    method.start_round(first=True)
    assert not method.queue.any()


def test_parts():
    method = make_method(*SIMILARITY)
    assert (method.static_parts, method.broadcast_parts, method.local_parts) == (("teacher",), ("teacher",), ("queue",))
    assert {name.partition(".")[0] for name in exchanged_names(method)} == {"encoder", "projector"}
    assert local_names(method) == ["queue"]
    assert (method.encoder.feature_dim, method.projector.out_features) == (16, TEACHER_DIM)
    assert make_method().local_parts == ()


def train_on(method: Distillation, images: Tensor, *overrides: str, indices: Tensor | None = None) -> float:
    training = LocalTrainer.build(compose([*WORDS, "batch_size=8", "local_epochs=2", *overrides]).training, method)
    rows = torch.arange(len(images)) if indices is None else indices
    return train(method, TensorImages(images), rows, training=training, generator=torch_generator(0, "train")).loss


def test_training_lowers_the_loss_and_keeps_the_teacher():
    generator = torch_generator(0, "images")
    images = torch.randint(256, (40, 1, 8, 8), dtype=torch.uint8, generator=generator)
    method = make_method()
    before = {name: value.clone() for name, value in method.teacher.state_dict().items()}
    first = train_on(method, images, "local_epochs=1")
    last = [train_on(method, images) for _ in range(3)][-1]
    assert last < 0.8 * first
    assert not method.teacher.training
    assert all(torch.equal(before[name], value) for name, value in method.teacher.state_dict().items())


def test_targets_belong_to_their_images(monkeypatch):
    """With images of one gray level each, the targets of a batch are recognized by their images."""
    images = torch.arange(0, 240, 10, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 8, 8).contiguous()
    indices = torch.tensor([20, 1, 17, 4, 9, 12, 3, 8, 22, 15])
    method, seen = make_method(), []
    features = method.targets(TensorImages(images), torch.arange(24))(torch.arange(24), images)

    def look(method, views):
        seen.extend(zip(views.images[0][:, 0, 0, 0].tolist(), views.targets, strict=True))
        return loss(method, views)

    loss = Distillation.loss
    monkeypatch.setattr(Distillation, "loss", look)
    train_on(method, images, "augmentation=none", "local_epochs=1", indices=indices)
    assert len(seen) == 10
    for pixel, target in seen:
        row = round((pixel * 0.3761 + 0.3053) * 255 / 10)
        assert row in indices
        torch.testing.assert_close(target, features[row], rtol=1e-4, atol=1e-5)


def test_clients_receive_the_architecture_as_plain_values():
    settings = compose([*WORDS, "dataset=cifar10", "output_dir=/runs/1"])
    text = make_task(settings).text()
    assert str(teacher_file()) not in text + settings.client_yaml
    full = parse_client_config(settings.client_yaml)
    composed = compose_task(text)
    assert training_components(composed) == (full.model, full.training, full.strategy)
    assert full.model.method.values["teacher_encoder"]["arguments"]["width"] == 6
    assert json.loads(text)["values"]["method.teacher_encoder"]["encoder"] == "conv_small"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["method=distillation"], "method=distillation needs a teacher, and teacher=null; give teacher=FILE"),
        (["method=distillation", "teacher=/nowhere/encoder.pt"], "teacher=/nowhere/encoder.pt does not exist"),
        ([*WORDS, "method.loss=cosin"], "method.loss=cosin must be cosine or mse or similarity"),
        ([*WORDS, "method.queue_size=0", "method.loss=similarity"], "method.queue_size=0 must be an integer"),
        (
            [*WORDS, "dataset.channels=3", "dataset.mean=[0,0,0]", "dataset.std=[1,1,1]"],
            r"was trained on images with 1 channel\(s\) but dataset.channels=3",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        Federation(tmp_path, *overrides)


DEVICE = [*FORM, "rounds=3", "local_epochs=1", "encoder.width=4", "strategy=fedavg", "run_id=mine", "batch_size=4"]


@pytest.fixture
def devices(tmp_path):
    """The configuration of a device, and a run with it."""
    images = write_images(tmp_path / "images", 6, size=12)
    device = context(data_path=images, state_path=tmp_path / "states", client_name="a")
    settings = compose([*DEVICE, *overrides_of("distillation"), f"output_dir={tmp_path / 'run'}"])
    return device, build_run(Devices(device), settings).federation


def test_a_federation_downloads_the_teacher_once_and_uploads_no_features(tmp_path):
    federation = Federation(tmp_path, *WORDS, *SIMILARITY, "strategy=fedavg", "num_clients=2")
    federation.run(2)
    assert federation.report.dropped == {}
    teacher = set(names_in_parts(federation.method, ["teacher"]))
    assert [set(plan["method-broadcast"]) for plan in federation.plans] == [teacher, teacher, set(), set()]
    exchanged = set(exchanged_names(federation.method))
    assert all(set(update["arrays"]) == exchanged for update in federation.updates)
    assert not any(update["method-upload"] for update in federation.updates)
    stored = torch.load(teacher_file(), weights_only=True)["weights"]
    for name, value in stored.items():
        np.testing.assert_array_equal(federation.state.models[GLOBAL].broadcast[f"teacher.{name}"], value.numpy())


RUN = [*WORDS, *SIMILARITY, "num_clients=3", "clients_per_round=2", "local_epochs=1", "dataset.limit=60", "threads=1"]
RUN += ["evaluate_every=1", "evaluation=none", "final_evaluation=none", "collapse_images=20", "rounds=3"]


def test_a_run_resumes_without_the_file_of_the_teacher(tmp_path):
    file = save_teacher(tmp_path / "encoder.pt", "encoder.width=6", "seed=7")
    run([*RUN, f"teacher={file}", f"output_dir={tmp_path / 'whole'}"])
    file.unlink()
    release_worker()
    other = repeat_from(2, tmp_path / "whole")
    left, right = (latest_checkpoint(folder / "checkpoints").models[GLOBAL] for folder in (tmp_path / "whole", other))
    assert same(left.layers, right.layers)
    assert left.broadcast
    assert same(left.broadcast, right.broadcast)
    shutil.rmtree(other / "checkpoints")
    with pytest.raises(InputError, match=r"teacher=.* does not exist; choose the encoder\.pt of a run folder"):
        run([f"resume={other}"])
    lines = read_lines(tmp_path / "whole" / "metrics.jsonl")
    assert all({"cost", "health"} <= line.keys() for line in lines)


def test_a_new_process_of_a_device_reads_the_features(devices, tmp_path, monkeypatch):
    device, federation = devices
    teacher = set(names_in_parts(federation.context.method, ["teacher"]))
    state, computed = ServerState(), []
    extract = teacher_module.extract
    monkeypatch.setattr(teacher_module, "extract", lambda *args, **given: computed.append(1) or extract(*args, **given))
    for number in (1, 2):
        release_worker()
        one = Round(federation, state)
        content = one.messages[0].content
        assert set(content["method-broadcast"]) == (teacher if number == 1 else set())
        reply = ask(content, device)
        assert not reply.has_error(), reply.error.reason
        state, report = finish(one, [Message(reply.content, reply_to=one.messages[0])])
        assert (report.dropped, len(computed)) == ({}, 1), number
    assert len(list((tmp_path / "states" / ".pictures" / "a" / "targets").iterdir())) == 1


@pytest.mark.parametrize("attempt", HOSTILE)
def test_a_device_builds_no_teacher_beyond_its_limits(devices, attempt):
    device, federation = devices
    changes, sentence = HOSTILE[attempt]
    content = copy.deepcopy(Round(federation, ServerState()).messages[0].content)
    task = json.loads(str(content.config_records[CONFIG]["settings"]))
    teacher = task["values"]["method.teacher_encoder"]
    for key, value in changes.items():
        (teacher["arguments"] if key in ("size", "width", "evil") else teacher)[key] = value
    content.config_records[CONFIG]["settings"] = json.dumps(task)
    reply = ask(content, device)
    assert reply.has_error()
    assert sentence in reply.error.reason
