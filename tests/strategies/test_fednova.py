"""FedNova by hand, against Eq. 7 in float64, and equal to federated averaging for equal steps."""

import numpy as np
import pytest

from fedssl.arrays import NO_COSINES, GlobalLayers
from fedssl.errors import InputError
from fedssl.wire.messages import ClientUpdate
from strategies.fednova import NormalizedSum, gamma
from tests.federation import Federation


def update(client, layers, *, examples):
    arrays = {name: np.array(value, np.float32) for name, value in layers.items()}
    return ClientUpdate(layers=arrays, partition_id=client, num_examples=examples)


def normalized(start, updates, steps, weighting="examples"):
    aggregator = NormalizedSum(weighting=weighting, norm=steps.__getitem__)
    aggregator.start(GlobalLayers({name: np.array(value, np.float32) for name, value in start.items()}))
    for one in updates:
        aggregator.add(one, NO_COSINES)
    return aggregator.finish()


def test_two_clients_by_hand():
    # p = 1/4 and 3/4, steps 1 and 4: tau = 1/4 + 3 = 3.25. d = (0 - 2) / 1 and (0 - 4) / 4 = -1.
    # sum p d = -0.5 - 0.75 = -1.25, and w = 0 + 3.25 * 1.25 = 4.0625. Statistics: (2 + 3 * 4) / 4 = 3.5.
    averaged = update(0, {"w": [2], "bn.running_mean": [2]}, examples=10)
    clients = [averaged, update(1, {"w": [4], "bn.running_mean": [4]}, examples=30)]
    new = normalized({"w": [0], "bn.running_mean": [0]}, clients, {10: 1, 30: 4})
    assert new["w"].tolist() == [4.0625]
    assert new["bn.running_mean"].tolist() == [3.5]
    assert gamma([10, 30], [1, 4]) == pytest.approx(3.25 * (1 / 4 + 3 / 16))


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_a_slow_transcription(weighting):
    random = np.random.default_rng(0)
    start, models = random.standard_normal(50), random.standard_normal((4, 50))
    examples, steps = [5, 70, 20, 1], [1.5, 9, 4, 2]
    p = np.array(examples if weighting == "examples" else [1] * 4, float)
    p /= p.sum()
    tau = sum(p_i * a for p_i, a in zip(p, steps, strict=True))
    direction = sum(p_i * (start - w) / a for p_i, w, a in zip(p, models, steps, strict=True))
    updates = [update(i, {"w": w}, examples=n) for i, (w, n) in enumerate(zip(models, examples, strict=True))]
    new = normalized({"w": start}, updates, dict(zip(examples, steps, strict=True)), weighting)
    np.testing.assert_allclose(new["w"], start - tau * direction, rtol=2e-5, atol=2e-6)  # Eq. 7
    assert gamma(p, steps) >= 1


def test_equal_steps_are_federated_averaging(tmp_path):
    nova = Federation(tmp_path / "nova", "strategy=fednova").run(2)
    average = Federation(tmp_path / "average", "strategy=fedavg").run(2)
    for name, layer in average.items():
        np.testing.assert_array_equal(nova[name], layer)


def test_the_server_knows_the_steps_of_every_client(tmp_path):
    # Momentum 0.5: velocities 1, 1.5, 1.75, ..., as in the test of `LocalSteps.norm`.
    overrides = ["strategy=fednova", "partition=quantity", "batch_size=8", "local_epochs=2", "optimizer.momentum=0.5"]
    federation = Federation(tmp_path, *overrides, "wire_dtype=int8")
    federation.run(1)
    server = federation.strategy.server
    assert server._norm(8) == 1 + 1.5
    assert server._norm(9) == 1 + 1.5 + 1.75 + 1.875
    assert all(np.isfinite(layer).all() for layer in federation.layers.values())


def test_what_it_does_not_support_is_refused(tmp_path):
    for override, reason in (("optimizer=adamw", "set optimizer=sgd"), ("local_epochs=0", "set local_epochs=1")):
        with pytest.raises(InputError, match=reason):
            Federation(tmp_path, "strategy=fednova", override)
