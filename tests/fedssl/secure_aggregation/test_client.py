"""Clients of secure aggregation accept no protocol that would reveal more than a sum."""

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedssl.errors import RequestRefused
from fedssl.fleet.limits import Limits
from fedssl.flower_internals import set_task_identity
from fedssl.secure_aggregation import client as client_side


def reply_to(values, *, state=None, limits=None):
    """What a client with such a state replies to a message of the protocol, without training."""
    set_task_identity()
    message = Message(RecordDict({client_side.SECAGG_CONFIG_KEY: ConfigRecord(values)}), 2, "train")
    context = Context(run_id=1, node_id=2, node_config={}, state=state or RecordDict(), run_config={})
    return client_side.secagg_reply(message, context, lambda: pytest.fail("it trained"), limits)


SETUP = {
    "stage": "setup",
    "sample_num": 5,
    "share_num": 5,
    "threshold": 3,
    "clipping_range": 8.0,
    "target_range": 2**22,
    "mod_range": 2**32,
    "max_weight": 1.0,
    "mask_generator": "chacha20",
}


@pytest.mark.parametrize(
    ("configs", "reason"),
    [
        ({**SETUP, "threshold": 1}, "5 shares, 1 of which reveal a mask"),
        ({**SETUP, "threshold": 2}, "5 shares, 2 of which reveal a mask"),
        ({**SETUP, "share_num": 4, "threshold": 2}, "4 shares, 2 of which reveal a mask"),  # not more than half
        ({**SETUP, "sample_num": 2, "share_num": 2, "threshold": 2}, "at least 3 clients"),
        ({**SETUP, "threshold": "3"}, "without the number of clients"),
        ({**SETUP, "mod_range": 2}, "mod_range=2 instead of 4294967296"),  # its masks are all 0
        ({**SETUP, "target_range": 2**31}, "target_range=2147483648 instead of 4194304"),
        ({**SETUP, "max_weight": 1e-9}, "max_weight=1e-09; it is 1.0 for equal weights, or a number"),
        ({**SETUP, "max_weight": 2.0**23}, "max_weight=8388608.0; it is 1.0 for equal weights, or a number"),
        ({**SETUP, "sample_num": 1024}, "no more than 1023"),  # their sum would exceed the modulus
        ({**SETUP, "share_num": 6, "threshold": 4}, "5 clients with 6 shares"),
        ({**SETUP, "clipping_range": float("nan")}, "clipping_range=nan"),
        ({**SETUP, "mask_generator": "zeros"}, "mask_generator='zeros'; known are chacha20, mt19937"),
        ({"stage": "collect_masked_vectors", "ctxts": [], "srcs": []}, "does not follow 'unmask'"),
        ({"stage": "unmask", "active_nids": [1, 2, 3], "dead_nids": []}, "does not follow 'unmask'"),
        ({"stage": "nonsense"}, "does not follow 'unmask'"),
    ],
)
def test_a_protocol_that_would_reveal_more_is_refused(configs, reason):
    with pytest.raises((RequestRefused, ValueError), match=reason):
        reply_to(configs)


def test_keys_of_a_server_are_read_before_they_are_used():
    state = RecordDict({client_side.STATE: ConfigRecord({"phase": "setup"})})
    for pair in ([10**12, 10**12], [b"x", b"y"], [b"x"], 3):  # the first would be a terabyte of zeros
        with pytest.raises(RequestRefused, match="secure aggregation sent no pairs of public keys"):
            reply_to({"stage": "share_keys", "2": pair}, state=state)


COLLECTED = {"phase": "collect_masked_vectors", "node": 2, "threshold": 2, "owners": [1, 2, 3]}
SHARES = {"seed_shares": [b"1", b"2", b"3"], "key_shares": [b"4", b"5", b"6"]}


@pytest.mark.parametrize(
    ("active", "dead", "reason"),
    [
        ([1, 2, 3], [3], "both shares of a client"),
        (None, [3], "both shares of a client"),
        ([1, 3], [2], "unmask 2 clients of which at least 2 must be neighbors that survived, and this client one"),
        ([2], [1, 3], "unmask 1 clients of which at least 2"),
        ([1, 2, 4], [], "unmask 3 clients of which at least 2"),
    ],
)
def test_shares_that_would_reveal_an_update_stay(active, dead, reason):
    state = RecordDict({client_side.STATE: ConfigRecord({**COLLECTED, **SHARES})})

    def unmask(active, dead):
        values = {"stage": "unmask", **({} if active is None else {"active_nids": active}), "dead_nids": dead}
        return reply_to(values, state=state)

    with pytest.raises(RequestRefused, match=reason):
        unmask(active, dead)
    reply = unmask([1, 2], [3]).content.config_records[client_side.SECAGG_CONFIG_KEY]
    assert dict(reply) == {"nids": [1, 2, 3], "shares": [b"1", b"2", b"6"]}
    with pytest.raises(RequestRefused, match="does not follow 'unmask'"):
        unmask([1, 2], [3])


HUNDRED = {**SETUP, "sample_num": 100, "share_num": 41, "threshold": 21}


@pytest.mark.parametrize(
    ("values", "limits", "reason"),
    [
        ({"share_num": 3, "threshold": 2}, {}, "with 2 neighbors and a threshold of 2 has 0 security bits"),
        ({"share_num": 21, "threshold": 11}, {}, "to 0.2, dropout_fraction to 0.2 and security_bits to 40 or more"),
        ({"share_num": 39, "threshold": 20}, {}, "26.9 security bits if 20 clients are corrupted and 20 drop out, but"),
        ({}, {"security_bits": 100}, "81.9 security bits .* this device requires 100 .security_bits of its limits."),
        ({}, {"corrupted_fraction": 0.4}, "if 40 clients are corrupted and 20 drop out"),
        ({}, {"dropout_fraction": 0.6}, "if 20 clients are corrupted and 60 drop out"),
        ({"mask_generator": "mt19937"}, {}, "mt19937 have 28 security bits, but this device requires 40"),
        ({"share_num": 21, "threshold": 11}, {"security_bits": 1, "corrupted_fraction": 0.01}, ""),
        ({"mask_generator": "mt19937"}, {"security_bits": 28}, ""),
        ({}, {}, ""),
    ],
)
def test_a_device_has_its_own_minimum(values, limits, reason):
    """The bounds for 100 clients with the defaults are 40 neighbors and a threshold of 21."""
    asked = {**HUNDRED, **values}
    if reason:
        with pytest.raises(RequestRefused, match=reason):
            reply_to(asked, limits=Limits(**limits))
    else:
        assert reply_to(asked, limits=Limits(**limits)).has_content()
    assert reply_to(asked).has_content()  # a simulated client has no limits
