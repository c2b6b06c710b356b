"""Schedules: rounds per stage by hand, what runs and is trained, what travels to whom, and whole runs."""

import numpy as np
import pytest
import torch

from fedssl.config.load import compose
from fedssl.config.overrides import CONF
from fedssl.encoders import conv_small, resnet18, vit_tiny
from fedssl.encoders.base import ActiveStages
from fedssl.errors import InputError
from fedssl.methods.base import build_method
from fedssl.model_arrays import exchanged_names, local_names
from fedssl.schedule.phases import layer_wise, phase_at
from fedssl.schedule.stages import Stages, frozen_names, set_active_stages
from fedssl.seeding import torch_generator
from simulation.run import run
from tests.cases import some
from tests.federation import Federation, model_of
from tests.methods import WHOLE, overrides_of

STRATEGIES = sorted(file.stem for file in (CONF / "strategy").glob("*.yaml"))
VIT = ["encoder=vit_tiny", "encoder.depth=3", "encoder.width=12", "encoder.patch=4"]


def test_depth_dropout_needs_stages_that_can_be_left_out(tmp_path):
    overrides = ["schedule=layer_wise", "schedule.depth_dropout=0.5", "engine=local", f"output_dir={tmp_path}"]
    with pytest.raises(InputError, match="which only a vision transformer supports"):
        run(overrides)


ENCODERS = {
    "conv_small": lambda: conv_small(channels=3, size=16, width=4),
    "resnet18": lambda: resnet18(channels=3, size=16),
    "vit_tiny": lambda: vit_tiny(channels=3, size=16, depth=4, width=12),
    "vit_mean": lambda: vit_tiny(channels=3, size=16, depth=4, width=12, pool="mean"),
}


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize(("depth", "frozen"), [(1, 0), (2, 1), (4, 3), (4, 1)])
def test_frozen_and_trained_stages_together_are_the_whole(kind, depth, frozen):
    """`forward_frozen` and then `forward` is what the stages are one after the other, in eval mode."""
    torch.manual_seed(0)
    encoder = ENCODERS[kind]()
    encoder.add_bridges()
    images = torch.rand(5, 3, 16, 16)
    encoder.eval()
    with torch.no_grad():
        x = encoder.run_stem(images)
        for stage in encoder.stage_modules()[:depth]:
            x = stage(x)
        expected = encoder.pool(x)
        if str(depth) in encoder.bridges:
            expected = encoder.bridges[str(depth)](expected)
        with encoder.run_stages(ActiveStages(depth, frozen)):
            inputs = encoder.forward_frozen([images], torch_generator(0, "x"))[0] if frozen else images
            result = encoder(inputs)
    assert result.shape == (5, encoder.feature_dim)
    assert torch.equal(result, expected)


def test_only_frozen_stages_are_in_eval_mode():
    encoder = ENCODERS["resnet18"]()
    with encoder.run_stages(ActiveStages(depth=3, frozen=2)):
        encoder.train()
        assert not encoder.bn1.training
        assert not encoder.layer2[1].bn2.training
        assert encoder.layer3[0].downsample[1].training
        encoder.eval()
        assert not encoder.layer3[0].bn1.training
    assert encoder.train().bn1.training


def test_depth_dropout_leaves_frozen_blocks_out_at_its_rate():
    """Each block is a function that adds its own power of ten, so that the sum tells which ones ran."""
    encoder = vit_tiny(channels=3, size=8, depth=4, width=12)

    class Add(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            return x + self.number

    for number, name in enumerate(encoder.stage_names):
        setattr(encoder.encoder.layers, name.rpartition(".")[2], Add(10.0**number))
    images, generator = torch.zeros(1, 3, 8, 8), torch_generator(0, "dropout")
    before = encoder.run_stem(images)
    seen = []
    with encoder.run_stages(ActiveStages(depth=4, frozen=3, depth_dropout=0.5)):
        for _ in range(400):
            first, second = encoder.forward_frozen([images, images], generator)
            assert torch.equal(first, second)
            seen.append(round((first - before).mean().item()))
    kept = [np.mean([value // 10**number % 10 for value in seen]) for number in range(3)]
    assert set(seen) == {0, 1, 10, 11, 100, 101, 110, 111}
    assert all(abs(share - 0.5) < 0.1 for share in kept)  # 4 standard deviations of a fair coin


def settings(*overrides):
    return compose(["rounds=6", "encoder.width=8", "schedule=layer_wise", *overrides]).model


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_trained_and_kept_in_a_stage(kind):
    method = build_method(settings(*overrides_of(kind)))
    whole = set(exchanged_names(method)) | set(local_names(method))
    every = {name: method.named_tensors[name].requires_grad for name in method.trainable}
    with set_active_stages(method, depth=2, frozen=1):
        trained = {name for name in method.trainable if method.named_tensors[name].requires_grad}
        assert {name for name in trained if name.startswith("encoder.")} == {
            *("encoder.blocks.1.0.weight", "encoder.blocks.1.1.weight", "encoder.blocks.1.1.bias"),
            *("encoder.bridges.2.weight", "encoder.bridges.2.bias"),
        }
        assert {name for name in trained if not name.startswith("encoder.")} == {
            name for name in method.trainable if not name.startswith("encoder.")
        }
        idle = ("encoder.blocks.2", "encoder.blocks.3", "encoder.bridges.1")
        assert not any(name.startswith(idle) for name in exchanged_names(method))
        assert {name.split(".")[3] for name in frozen_names(method)} == {"0", "1"}
        assert all(name.startswith("encoder.blocks.0.") for name in frozen_names(method))
        assert not any(name.startswith("target_encoder.blocks.0") for name in local_names(method))
        with set_active_stages(method, depth=4):
            assert {name for name in method.trainable if not method.named_tensors[name].requires_grad} == {
                name for name in method.trainable if ".bridges." in name
            }
            used = set(exchanged_names(method)) | set(local_names(method))
            assert used == {name for name in whole if ".bridges." not in name}
        assert {name for name in method.trainable if method.named_tensors[name].requires_grad} == trained
    assert set(exchanged_names(method)) | set(local_names(method)) == whole
    assert {name: method.named_tensors[name].requires_grad for name in method.trainable} == every


def test_weights_are_handed_on_at_the_beginning_of_a_phase():
    method = build_method(settings(*VIT))
    layers = {name: value.detach().numpy().copy() for name, value in method.named_tensors.items()}
    stages, phases = Stages(method), layer_wise(rounds=6, depth=3)
    assert stages.transfer_weights(layers, phases[0]) is layers
    begun = stages.transfer_weights(layers, phases[1])
    for name in layers:
        source = name.replace("encoder_layer_1", "encoder_layer_0")
        assert np.array_equal(begun[name], layers[source]), name
        assert name == source or begun[name] is not layers[source]  # its own memory
    off = layer_wise(rounds=6, depth=3, weight_transfer=False)
    assert stages.transfer_weights(layers, off[1]) is layers


def parts(names):
    """ "1" to "3" for the blocks of the transformer, "stem", "ln" and the names of the heads."""
    result = set()
    for name in names:
        if "encoder_layer_" in name:
            result.add(str(1 + int(name.split("encoder_layer_")[1][0])))
        elif name.startswith("encoder."):
            result.add("ln" if ".ln." in name else "stem")
        else:
            result.add(name.partition(".")[0])
    return result


HEADS = {"projector", "predictor", "ln"}  # and the last normalization, which stands behind every stage


def test_what_travels_layer_wise(tmp_path):
    """Table 2 of LW-FedSSL, FedMoCo-LW: down and up the newest stage; and once each, what a client lacks before it."""
    overrides = [*VIT, "method=moco_v3", "strategy=fedavg", "schedule=layer_wise", "rounds=6", "num_clients=2"]
    federation = Federation(tmp_path, *overrides)
    federation.run(6)
    down = [parts(plan["arrays"]) for plan in federation.plans[::2]]
    up = [parts(update["arrays"]) for update in federation.updates[::2]]
    assert up == [s | HEADS for s in ({"1", "stem"}, {"1", "stem"}, {"2"}, {"2"}, {"3"}, {"3"})]
    assert down[:2] == up[:2]
    assert down[2:4] == [{"stem", "1", "2"} | HEADS, {"2"} | HEADS]  # the end of stage 1 is new to the client
    assert down[4:] == [{"2", "3"} | HEADS, {"3"} | HEADS]


def test_a_late_client_receives_and_pays_what_it_lacks(tmp_path):
    """With one of three clients per round, the bytes of a plan are those of the layers that its client had not seen."""
    overrides = [*VIT, "strategy=fedavg", "schedule=layer_wise", "rounds=9", "num_clients=3", "clients_per_round=1"]
    federation = Federation(tmp_path, *overrides)
    held = dict.fromkeys(range(3), 0)  # stages that a client received when they were frozen
    late = 0
    for round in range(1, 10):
        stage = phase_at(federation.components.context.phases, round)
        federation.run(1)
        (row,) = federation.report.clients
        lacked = {str(s) for s in range(held[row.client] + 1, stage.frozen + 1)}
        late += len(lacked) > 1
        stem = {"stem"} if stage.depth == 1 or not held[row.client] else set()
        assert parts(federation.plans[-1]["arrays"]) == {"projector", "ln", str(stage.depth)} | lacked | stem
        content = federation.plans[-1]
        arrays = sum(array.numpy().nbytes for array in content["arrays"].values())
        assert arrays < row.bytes_down < arrays + 20_000
        held[row.client] = stage.frozen
    assert late  # or the test has seen no late client


def test_a_client_without_its_layers_receives_them_again(tmp_path):
    overrides = [*VIT, "strategy=fedavg", "schedule=layer_wise", "rounds=12", "num_clients=2"]
    federation = Federation(tmp_path, *overrides)
    federation.run(5)
    for file in tmp_path.glob("clients/0000/1/frozen/*"):
        file.unlink()
    federation.run(1)
    assert list(federation.report.dropped) == [1]
    assert "the plan lacks" in federation.report.dropped[1]
    federation.run(1)
    assert federation.report.dropped == {}


# Their clients do what those of another strategy do.
PLAIN = ("eua", "fedprox", "krum", "l_dawa_fedu", "loss_weighted", "m_dawa", "median", "trimmed_mean")


@pytest.mark.parametrize("name", some([name for name in STRATEGIES if name not in PLAIN], default=["featarc"]))
@pytest.mark.parametrize("schedule", some(["layer_wise", "progressive"], default=["layer_wise"]))
def test_every_strategy_works_in_stages(tmp_path, name, schedule):
    if name == "moon":
        schedule = "progressive"  # its regularizer needs images
    overrides = [f"strategy={name}", "method=byol", "rounds=5", f"schedule={schedule}", "num_clients=3"]
    federation = Federation(tmp_path, *overrides)
    before = {key: (array.shape, array.dtype) for key, array in federation.layers.items()}
    start = dict(federation.layers)
    federation.run(5)  # two of the first phase, one of each other
    assert federation.report.dropped == {}
    trained = []  # a model of a cluster may lose all its clients
    for model in federation.state.model_names():
        after = model_of(federation.components.context, federation.state, model).layers
        assert {key: (array.shape, array.dtype) for key, array in after.items()} == before
        assert all(np.isfinite(array).all() for array in after.values())
        weights = [key for key in after if key.endswith("0.weight") and "blocks" in key]
        trained.append(all(not np.array_equal(after[key], start[key]) for key in weights))
    assert all(trained) or (name == "clustered" and any(trained))


@pytest.mark.parametrize("kind", some(WHOLE, default=["swav"]))
def test_every_method_works_layer_wise_with_calibration(tmp_path, kind):
    overrides = ["strategy=eua", *overrides_of(kind), "rounds=4", "schedule=layer_wise", "num_clients=2"]
    calibration = [] if kind == "supervised" else ["calibration=auxiliary"]
    federation = Federation(tmp_path, *overrides, *calibration)
    assert all(np.isfinite(array).all() for array in federation.run(4).values())
    assert federation.report.dropped == {}


def test_a_run_in_stages_is_not_resumed_with_other_rounds(tmp_path):
    overrides = ["schedule=progressive", "num_clients=2", "rounds=4", "local_epochs=0", "dataset.limit=40"]
    overrides += ["measure_resources=false", "collapse_images=0"]
    run([*overrides, "final_evaluation=none", "evaluate_every=0", f"output_dir={tmp_path}/a"])
    with pytest.raises(InputError, match="rounds=4"):
        run([f"resume={tmp_path}/a", "rounds=8"])
