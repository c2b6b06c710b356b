"""L-DAWA_FedU: L-DAWA on the server, and clients that scale what they send."""

import pytest

from fedssl.arrays import GlobalLayers
from fedssl.wire.messages import NUM_EXAMPLES, ClientUpdate
from strategies.l_dawa import l_dawa, scale_layers
from strategies.l_dawa_fedu import LDAWAFedU
from tests.arrays import same
from tests.strategies.clients import make_byol, make_plan, participate, some_layers


def test_l_dawa_fedu_is_eq_5_on_the_server():
    method, strategy = make_byol(), LDAWAFedU()
    assert strategy.describe_communication(method).required_metrics == (NUM_EXAMPLES,)
    layers = some_layers(method, 0)
    sent = [some_layers(method, client + 1) for client in range(3)]
    updates = [ClientUpdate(layers=x, partition_id=client, num_examples=10 + client) for client, x in enumerate(sent)]
    reference, rule = GlobalLayers(layers), strategy.server.aggregator(1)
    rule.start(reference)
    for update in updates:
        rule.add(update, reference.cosines_of(update.layers))
    assert same(rule.finish(), l_dawa(layers, updates, weighting="examples"))


@pytest.mark.parametrize("aggregate", ["online", "target"])
def test_clients_scale_the_networks_that_they_send(tmp_path, aggregate):
    method = make_byol()
    plan = make_plan(1, some_layers(method, 1))
    plain = participate(method, LDAWAFedU(aggregate=aggregate), plan, tmp_path / "plain")[2]
    scaled = participate(method, LDAWAFedU(aggregate=aggregate, scale_at="client"), plan, tmp_path / "scaled")[2]
    assert same(scaled, scale_layers(plan.layers, plain))
    assert not same(scaled, plain)
