"""The names that scripts import are those of `strategies.types`."""

from strategies import interfaces, types


def test_names_are_those_of_the_types():
    assert "ServerState" in interfaces.__all__
    assert all(getattr(interfaces, name) is getattr(types, name) for name in interfaces.__all__)
