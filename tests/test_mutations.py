"""The mutations of tests/mutations can be applied to the present code; `python -m tests.mutations.run` runs them."""

from collections import Counter

from tests.mutations.run import PACKAGES, ROOT, problems, read_mutations


def test_every_mutation_is_applicable() -> None:
    assert problems(read_mutations()) == []


def test_every_planted_bug_is_applicable() -> None:
    planted = read_mutations(ROOT / "tests/faults/planted.toml")
    assert len(planted) >= 10
    assert problems(planted) == []


def test_every_package_has_three_mutations() -> None:
    packages = [*PACKAGES, *(f"fedssl/{file.parent.name}" for file in ROOT.glob("fedssl/*/__init__.py"))]
    counts = Counter(mutation.package for mutation in read_mutations())
    assert [package for package in packages if counts[package] < 3] == []
