"""Target networks between rounds: kept, copied, or travelling and averaged."""

import numpy as np
import pytest
from torch import nn

from fedssl.arrays import Layers
from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.methods.base import build_method
from fedssl.methods.momentum import EMAMethod
from fedssl.model_arrays import exchanged_names, local_names
from fedssl.rules import check_rules
from fedssl.wire.messages import ARRAYS, TrainPlan
from fedssl.wire.records import record_to_arrays
from tests.arrays import same
from tests.contexts import run_context
from tests.federation import Federation

TARGETS = ("target_encoder", "target_projector")
SMALL = ["method.projector.hidden_dim=16", "batch_size=16"]
VIT = ["encoder=vit_tiny", "encoder.depth=2", "encoder.width=12", "encoder.patch=4"]


def of_targets(layers: Layers) -> Layers:
    return {name: array for name, array in layers.items() if name.startswith(TARGETS)}


def run(folder, *overrides, rounds=3) -> Federation:
    federation = Federation(folder, f"rounds={rounds}", *SMALL, *overrides)
    federation.run(rounds)
    return federation


def parts(names) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    ("method", "kept", "more"),
    [("byol", set(), {"predictor"}), ("moco_v3", set(), {"predictor"}), ("orchestra", {"memory"}, {"rotation"})],
)
def test_what_stays_and_what_travels(method, kept, more):
    averaged = build_method(compose([f"method={method}", "method.target_init=average"]).model)
    assert parts(local_names(averaged)) == kept
    assert parts(exchanged_names(averaged)) == {"encoder", "projector", *TARGETS, *more}
    for target in ("persist", "reset"):
        own = build_method(compose([f"method={method}", f"method.target_init={target}"]).model)
        assert parts(local_names(own)) == {*TARGETS, *kept}
        assert parts(exchanged_names(own)) == {"encoder", "projector", *more}


@pytest.mark.parametrize("method", ["byol", pytest.param("orchestra", marks=pytest.mark.heavy)])
def test_the_server_averages_the_targets(tmp_path, method):
    """By hand: the mean of what two clients sent, by their numbers of images."""
    overrides = ["num_clients=2", "strategy=fedavg", "strategy.weighting=examples", "dataset.limit=40"]
    overrides += ["partition=dirichlet", "partition.alpha=0.5", f"method={method}", "method.target_init=average"]
    federation = Federation(tmp_path, *SMALL, *overrides)
    start = federation.layers
    first = of_targets(start)
    for name, array in first.items():  # begins as a copy of the untrained online network
        np.testing.assert_array_equal(array, start[name.removeprefix("target_")])
    federation.run(1)
    sizes = [len(part) for part in federation.components.client_data.parts]
    assert sizes[0] != sizes[1]
    sent = [of_targets(record_to_arrays(update.array_records[ARRAYS])) for update in federation.updates]
    assert all(set(layers) == set(first) for layers in sent)
    received = TrainPlan.from_content(federation.plans[0]).layers
    assert of_targets(received).keys() == first.keys()
    after = of_targets(federation.layers)
    for name, array in after.items():
        mean = sum(size * layers[name].astype(float) for size, layers in zip(sizes, sent, strict=True)) / sum(sizes)
        expected = np.round(mean) if array.dtype.kind == "i" else mean
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-7, err_msg=name)
    federation.run(1)
    again = of_targets(TrainPlan.from_content(federation.plans[2]).layers)
    assert all(np.array_equal(again[name], after[name]) for name in after)
    # They lag behind the online network: neither did they stay where they were, nor are they copies.
    weight = "target_encoder.blocks.0.0.weight"
    assert not np.array_equal(after[weight], first[weight])
    assert not np.array_equal(after[weight], federation.layers["encoder.blocks.0.0.weight"])


def test_stages_send_the_targets_of_what_is_trained(tmp_path):
    overrides = ["num_clients=2", "dataset.limit=40", "strategy=fedavg", "method=byol"]
    overrides += ["method.target_init=average", *VIT]
    federation = run(tmp_path, *overrides, "schedule=layer_wise", rounds=4)
    for number, update in enumerate(federation.updates):
        sent = record_to_arrays(update.array_records[ARRAYS])
        for layer, stage in (("encoder_layer_0", 1), ("encoder_layer_1", 2)):
            present = {name.partition(".")[0] for name in sent if layer in name}
            assert present == ({"encoder", "target_encoder"} if stage == 1 + number // 4 else set())
    # Frozen stages come down once for all networks: the target has none of its own.
    down = TrainPlan.from_content(federation.plans[4]).layers
    assert {name.partition(".")[0] for name in down if "encoder_layer_0" in name} == {"encoder"}
    # A stage's target begins as a copy of the online network.
    for name, array in of_targets(down).items():
        np.testing.assert_array_equal(array, down[name.removeprefix("target_")])


def test_fedavg_with_reset_targets_is_a_cell_of_table_4(tmp_path):
    overrides = ["clients_per_round=2", "method=byol", "method.target_init=reset"]
    plain = run(tmp_path / "fedavg", *overrides, "strategy=fedavg")
    cell = ["strategy=fedu", "strategy.update=both", "strategy.predictor=global"]
    fedu = run(tmp_path / "fedu", *overrides, *cell)
    assert same(plain.layers, fedu.layers)


REFUSED = ("fedu", "l_dawa_fedu")


@pytest.mark.parametrize("strategy", REFUSED)
def test_clients_that_choose_one_of_two_networks_refuse_both(strategy):
    settings = compose([f"strategy={strategy}", "method=byol", "method.target_init=average"])
    context = run_context(build_method(settings.model), num_clients=10, clients_per_round=2)
    message = "method.target_init=average exchanges .* set method.target_init=persist, or"
    with pytest.raises(InputError, match=message) as caught:
        check_rules([settings.algorithm.strategy.instantiate().problem], context)
    assert "\n" not in str(caught.value)


def test_a_cosine_increase_of_the_decay_by_hand():
    """Five rounds from 0.9 to 1: the cosine of 0, 45, 90, 135 and 180 degrees; halfway 0.95."""
    method = EMAMethod(nn.Identity(), ema_decay=0.9, ema_schedule="cosine")

    def decay(round, rounds):
        method.round, method.rounds = round, rounds
        return method.current_decay

    quarter = 1 - 0.1 * (1 + 0.5**0.5) / 2
    assert [decay(round, 5) for round in range(1, 6)] == pytest.approx([0.9, quarter, 0.95, 1.9 - quarter, 1.0])
    assert decay(1, 1) == 0.9
    assert decay(9, 5) == pytest.approx(1.0)  # a round beyond the planned ones
