"""Words that leave the range of a setting, and what they must be."""

import re

import pytest

from fedssl.config.load import compose
from fedssl.errors import InputError

REFUSED = {
    "pause_after=0": "an integer of at least 1, or null",
    "server_optimizer=fedavgm server_optimizer.lr=0": "a number above 0; the default is 1.0",
    "server_optimizer=fedavgm server_optimizer.momentum=1": "a number of at least 0 and below 1; the default is 0.9",
    "server_optimizer=fedadam server_optimizer.lr=0": "a number above 0; the default is 0.1",
    "server_optimizer=fedadam server_optimizer.beta_1=-0.1": "a number of at least 0 and below 1; the default is 0.9",
    "server_optimizer=fedadam server_optimizer.tau=0": "a number above 0; the default is 0.001",
    "server_optimizer=fedyogi server_optimizer.beta_2=1.5": "a number of at least 0 and below 1; the default is 0.99",
    "strategy=featarc strategy.clusters=0": "an integer of at least 1; the default is 2",
    "strategy=featarc strategy.num_images=1": "an integer of at least 2; the default is 512",
    "strategy=featarc strategy.assign_at=moon": "client or server; the default is client",
    "strategy=clustered strategy.assign_by=x": "loss or update_cosine; the default is loss",
    "strategy=clustered strategy.rule=x": "fedavg or l_dawa or eua or loss_weighted or m_dawa or median; the default",
    "strategy=clustered strategy.cluster_round=0": "an integer of at least 1; the default is 1",
    "strategy=fedu strategy.aggregate=both": "online or target;",
    "strategy=fedu strategy.update=none": "online or target or both;",
    "strategy=fedu strategy.predictor=mine": "dapu or global or local;",
    "strategy=l_dawa_fedu strategy.distance=l2": "mean_conv_l2 or squared_l2;",
    "strategy=l_dawa_fedu strategy.predictor_threshold=-0.1": "a number of at least 0;",
    "strategy=fedema strategy.tau=-1": "a number of at least 0",
    "strategy=gossip strategy.topology=mesh": "ring or grid or star or complete or random_regular or erdos_renyi or f",
    "strategy=gossip strategy.degree=1.5": "an integer of at least 1, or null; the default is null",
    "strategy=gossip strategy.probability=x": "a number above 0 and at most 1, or null; the default is null",
    "client_speed=lognormal client_speed.sigma_rounds=-1": "a number from 0 to 10",
    "availability=diurnal availability.period=0": "a number of at least 1",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_value_out_of_range_is_refused_in_one_sentence(words):
    last = words.split()[-1]
    with pytest.raises(InputError, match=f"^{re.escape(last)} must be {re.escape(REFUSED[words])}") as refusal:
        compose(words.split())
    assert "\n" not in str(refusal.value)
