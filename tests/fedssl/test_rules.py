import pytest

from fedssl.errors import InputError
from fedssl.rules import check_rules


def test_the_first_broken_rule_is_the_error():
    rules = [lambda value: None, lambda value: f"first {value}", lambda value: "second"]
    with pytest.raises(InputError, match="^first 3$"):
        check_rules(rules, 3)
    check_rules(rules[:1], 3)
