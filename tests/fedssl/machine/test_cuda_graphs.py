"""Recorded steps, without a GPU: what a step asks for is recorded on the CPU, and done again on the same memory."""

import pytest
import torch

from client_app.worker import release_worker
from fedssl.config.load import compose
from fedssl.datasets.images import TensorImages
from fedssl.errors import InputError
from fedssl.machine import cuda_graphs
from fedssl.machine.cuda_graphs import captures_steps
from fedssl.methods.base import build_method
from fedssl.methods.simclr import SimCLR
from fedssl.regularizers import fur
from fedssl.regularizers.base import Regularizer
from fedssl.seeding import seed_generators, torch_generator
from fedssl.training import LocalTrainer, train
from tests.cases import some
from tests.federation import Federation
from tests.gpu_stand_in import treat_cpu_as_gpu
from tests.methods import METHODS, overrides_of
from tests.recorded_client import SMALL, Client, both_ways
from tests.recording import Recorder

GPU_SETTINGS = ["optimizer=adamw", "optimizer=adam", "clip_norm=0.01", "precision=bf16", "gpu_augmentation=triton"]
GPU_SETTINGS += [f"regularizer={name}" for name in ("prox", "fur", "decorr", "alignment", "l2_sp")]


@pytest.mark.parametrize("method", some(METHODS, default=("dino", "mae", "swav")))
def test_a_captured_step_gives_the_same_bits_for_every_method(method):
    """Run 12 steps (2 rounds, 2 epochs, 3 batches): 3 run eagerly, the fourth is captured, and 8 are replayed."""
    overrides = [*overrides_of(method), "optimizer=sgd"]
    if not build_method(compose([*SMALL, *overrides]).model).cuda_graph_safe:
        pytest.skip("its steps differ")
    if method == "ibot":  # batches differ in the number of hidden patches
        recorded, recorder, plain = both_ways(*overrides, rounds=8)
        assert recorder.replayed > recorder.recorded > 0
    else:
        recorded, recorder, plain = both_ways(*overrides)
        assert (recorder.recorded, recorder.replayed) == (1, 8)
    assert recorded.is_like(plain)


@pytest.mark.parametrize(
    "overrides",
    [
        ["regularizer=feature_distillation"],
        ["clip_norm=0.01", "precision=bf16", "channels_last=false", "optimizer=adamw", "regularizer=prox"],
        pytest.param(["method=fedca", "method.sent_per_round=0"], marks=pytest.mark.heavy),
        ["method=swav", "method.queue_size=16", "method.queue_start_round=1", "augmentation=digits_multi_crop"],
    ],
    ids=" ".join,
)
def test_a_captured_step_gives_equal_bits_with_every_setting(overrides):
    recorded, recorder, plain = both_ways(*overrides)
    assert (recorder.recorded, recorder.replayed) == (1, 8)
    assert recorded.is_like(plain)


@pytest.mark.parametrize("variant", some(["uot", "tangent_swd"], default=["tangent_swd"]))
def test_fur_as_a_gpu_computes_it_can_be_captured(monkeypatch, variant):
    """A GPU takes a fixed number of steps and draws from torch's own generator, which goes on from step to step."""
    monkeypatch.setattr(fur, "is_gpu", lambda device: True)
    recorded, recorder, plain = both_ways("regularizer=fur", f"regularizer.variant={variant}")
    assert (recorder.recorded, recorder.replayed) == (1, 8)
    assert recorded.is_like(plain)


def test_batches_of_another_size_are_captured_by_themselves(monkeypatch):
    """25 images are batches of 7, 6, 6 and 6: in 4 epochs 4 steps of the one kind and 12 of the other."""
    recorded, recorder, plain = both_ways(num_images=25)
    assert (recorder.recorded, recorder.replayed) == (2, 8)
    assert recorded.is_like(plain)
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    recorded, recorder, plain = both_ways(num_images=25)
    assert (recorder.recorded, recorder.replayed) == (1, 8)  # the 6; the 7 is not twice as frequent
    assert recorded.is_like(plain)


@pytest.mark.parametrize(
    ("sizes", "constants", "expected"),
    [
        # Images of kind A and of kind B: A is captured in its 4th step, B in its 9th, the first above twice 4.
        ([4] * 4 + [5] * 10 + [4], [()] * 15, [0, 0, 0, 1, *[1] * 8, 2, 2, 2]),
        # A constant that changes every 5 steps: the 4th step of every round is captured.
        ([4] * 15, [(1,)] * 5 + [(2,)] * 5 + [(3,)] * 5, [0, 0, 0, *[1] * 5, *[2] * 5, 3, 3]),
    ],
    ids=["a kind twice as frequent", "steps of later rounds"],
)
def test_with_room_for_one_another_step_replaces_it(monkeypatch, sizes, constants, expected):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    recorder = Recorder()
    client = Client(record=recorder)
    captured_at = []
    for size, constant in zip(sizes, constants, strict=True):
        client.training.graphs.run(lambda views: views[0].images.sum(), client.views(size), constants=constant)
        captured_at.append(recorder.recorded)
    assert captured_at == expected


@pytest.mark.parametrize(("method", "schedule"), [("simclr", "layer_wise"), ("byol", "progressive")])
def test_a_new_stage_is_captured_anew(method, schedule):
    """What was recorded trains the layers of the stage before."""
    recorder = Recorder()
    overrides = [f"method={method}", f"schedule={schedule}"]
    recorded, plain = Client(*overrides, record=recorder), Client(*overrides)
    for client in (recorded, plain):
        for depth in (1, 2, 2):
            client.round(depth=depth, frozen=depth - 1 if schedule == "layer_wise" else 0)
    assert (recorder.recorded, recorder.replayed) == (2, 2 + 8)
    assert recorded.is_like(plain)


def test_numbers_that_change_between_rounds_are_captured_anew():
    class Scheduled(SimCLR):
        step_constants = property(lambda self: (self.round,))

        def loss(self, views):
            return self.round * super().loss(views)

    recorder = Recorder()
    recorded, plain = Client(record=recorder), Client()
    for client in (recorded, plain):
        client.method.__class__ = Scheduled
        for number in (1, 2, 2):
            client.method.round = number
            client.round()
    assert (recorder.recorded, recorder.replayed) == (2, 2 + 8)
    assert recorded.is_like(plain)


def test_prototypes_frozen_in_round_one_are_captured_anew():
    """Momentum of fused SGD needs a gradient of all weights in all rounds."""
    recorder = Recorder()
    recorded, plain = Client("method=swav", record=recorder), Client("method=swav")
    for client in (recorded, plain):
        before = client.method.prototypes.weight.clone()
        for number in (1, 2, 2):
            client.method.round = number
            client.round()
            assert torch.allclose(client.method.prototypes.weight, before, atol=1e-6) == (number == 1)
    assert (recorder.recorded, recorder.replayed) == (2, 2 + 8)
    assert recorded.is_like(plain)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["optimizer.fused=false"], r"cuda_graphs=true needs optimizer\.fused=true or null"),
        (["+optimizer.dampening=0.1"], r"dampening=0\.1 .*; set optimizer\.dampening=0 or cuda_graphs=false"),
        (["method=fedca"], r"the steps of FedCA differ with these settings; set cuda_graphs=false"),
        (["regularizer=fur", "regularizer.gpu_iter=0"], "the steps of FUR differ"),
    ],
)
def test_what_cannot_be_captured_is_refused_on_every_machine(overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        Client("cuda_graphs=true", *overrides)
    Client(*overrides)


SGD = {"_target_": "torch.optim.SGD"}


class Plugin:
    cuda_graph_safe = True


@pytest.mark.parametrize(
    ("wanted", "optimizer", "device", "safe", "expected"),
    [
        (None, {"fused": None}, "cuda", True, True),
        (None, {"fused": True, "dampening": 0}, "cuda", True, True),
        (None, {"fused": None}, "cpu", True, False),
        (None, {"fused": None}, "mps", True, False),
        (None, {"fused": False}, "cuda", True, False),
        (None, {}, "cuda", True, False),  # an optimizer without fused steps
        (None, {"fused": None, "dampening": 0.1}, "cuda", True, False),
        (None, {"fused": None}, "cuda", False, False),
        (False, {"fused": None}, "cuda", True, False),
        (True, {"fused": None}, "cuda", True, True),
        (True, {"fused": None}, "cpu", True, False),
    ],
)
def test_where_steps_are_captured_by_default(wanted, optimizer, device, safe, expected):
    part = Regularizer()
    part.cuda_graph_safe = safe
    assert captures_steps(wanted, {**SGD, **optimizer}, [part], torch.device(device)) == expected


def test_plugins_are_captured_on_request_only():
    cuda = torch.device("cuda")
    own = {"_target_": "mine.SGD", "fused": None}
    for optimizer, part in (({**SGD, "fused": None}, Plugin()), (own, Regularizer())):
        assert not captures_steps(None, optimizer, [part], cuda)
        assert captures_steps(True, optimizer, [part], cuda)


def test_an_encoder_of_a_plugin_is_captured_on_request_only():
    """It may skip blocks by random numbers of Python, as stochastic depth does, which a captured step never draws."""
    settings = {**SGD, "fused": None}
    for encoder in ("vit_tiny", "resnet18", "timm"):
        method = build_method(compose([f"encoder={encoder}", "dataset=digits", "dataset.size=32"]).model)
        assert captures_steps(None, settings, [method], torch.device("cuda"))
    method.encoder.__class__ = type("Mine", (type(method.encoder),), {"__module__": "mine"})
    assert not captures_steps(None, settings, [method], torch.device("cuda"))
    assert captures_steps(True, settings, [method], torch.device("cuda"))


def test_reading_a_number_off_the_device_ends_the_recording():
    """The stand-in refuses what a GPU refuses; otherwise it would prove nothing of steps that wait."""
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="_local_scalar_dense waits for the device"):
        recorder(lambda: torch.ones(2) * torch.ones(()).item())


@pytest.mark.heavy
def test_a_run_whose_clients_record_gives_the_same_bits(monkeypatch, tmp_path):
    """As on a GPU: all clients of a process use what one of them has recorded; Per-SSL trains a second model too."""
    overrides = [*SMALL, "strategy=per_ssl", "method=byol", "num_clients=2", "dataset.limit=48"]
    treat_cpu_as_gpu(monkeypatch)
    monkeypatch.setattr(TensorImages, "place", lambda images, device: images)
    expected = Federation(tmp_path / "plain", *overrides).run(2)
    recorder = Recorder()
    monkeypatch.setattr(cuda_graphs, "capture_on_gpu", lambda device: recorder)
    layers = Federation(tmp_path / "recorded", *overrides, "cuda_graphs=true").run(2)
    release_worker()
    assert recorder.recorded >= 1
    assert recorder.replayed > 10 * recorder.recorded
    assert layers.keys() == expected.keys()
    assert all((layers[name] == expected[name]).all() for name in layers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("chosen", [*GPU_SETTINGS, *(f"method={name}" for name in METHODS)])
def test_a_gpu_records_its_steps(chosen):
    """Kernels of a GPU need not add in the same order in every step, so numbers are near, not equal."""
    results = []
    of_method = overrides_of(chosen.removeprefix("method=")) if chosen.startswith("method=") else []
    for overrides in ([], ["cuda_graphs=false"]):
        settings = compose([*SMALL, "optimizer.fused=null", *of_method, chosen, *overrides])
        training_on = build_method(settings.model).to("cuda")
        training = LocalTrainer.build(settings.training, training_on)
        images = torch.randint(256, (24, 1, 8, 8), dtype=torch.uint8, generator=torch_generator(0, "pictures")).cuda()
        labels = torch.arange(24, device="cuda") % 10 if training_on.uses_labels else None
        seed_generators(0, torch.device("cuda", 0))
        training_on.start_round(first=True)
        training.reset_optimizer(lr_factor=1.0)
        rows, generator = torch.arange(24), torch_generator(0, "gpu")
        trained = train(training_on, TensorImages(images), rows, training=training, generator=generator, labels=labels)
        results.append(trained.loss)
        assert (training.graphs is None) == (
            bool(overrides) or not (training_on.cuda_graph_safe and training.regularizer.cuda_graph_safe)
        )
    assert results[0] == pytest.approx(results[1], rel=1e-2)
