"""Splits in the names of files and folders, recognized by the words of Hugging Face's ``datasets``.

A name is that of a split if it contains a word of exactly one split, in any case, between the ends of the name and the
characters ``- . _``, spaces and digits: ``Training``, ``seg_test``, ``val2017``. ``unlabeled`` is a word, too. A
capital letter that follows is a domain: ``trainA`` and ``testB``, as of CycleGAN.
"""

import re
from collections.abc import Collection, Iterable

from fedssl.errors import InputError, shortened

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
    "unlabeled": ("unlabeled",),
}
_SPLITS = {word: split for split, words in _WORDS.items() for word in words}
_PATTERN = re.compile(rf"(?<![^-._ 0-9])((?i:{'|'.join(_SPLITS)}))((?<=[a-z])[A-Z])?(?![^-._ 0-9])")
HELD_OUT = ("test", "validation")  # splits that are not for training; the first that exists is the test


def split_of(name: str) -> str | None:
    """Return the split in a name: "train", "validation", "test" or "unlabeled"; None if it names none or several."""
    found = {_SPLITS[word.lower()] for word, _ in _PATTERN.findall(name)}
    return found.pop() if len(found) == 1 else None


def domain_of(name: str) -> str:
    """Return the letter of a domain after the word of a split, such as "A" of "trainA"; empty if there is none."""
    return next((letter for _, letter in _PATTERN.findall(name)), "")


def split_of_word(word: str) -> str | None:
    """Return the split of a word, such as "validation" of "val"; None for other words."""
    return _SPLITS.get(word.lower())


def same_split(first: str, second: str) -> bool:
    """Return whether two values of ``dataset.splits`` are the same split, such as "val" and "validation"."""
    kinds = split_of_word(first), split_of_word(second)
    return first.lower() == second.lower() or (kinds[0] is not None and kinds[0] == kinds[1])


def matching(split: str, names: Iterable[str]) -> list[str]:
    """Return the names of a split: those equal to ``split``, in any case, or else those with a word of its kind."""
    names, kind = list(names), split_of_word(split)
    exact = [name for name in names if name.lower() == split.lower()]
    return exact or [name for name in names if kind is not None and split_of(name) == kind]


def is_held_out_of(chosen: Collection[object], train: Collection[object], *, split: str, fraction: float) -> bool:
    """Return whether a test share is held out of the chosen parts of a data set: if they are those for training.

    Raise an `InputError` if they are some of these, because the share is one of all.
    """
    if chosen and {*chosen} < {*train}:
        raise InputError(
            f"dataset.splits names {split!r}, but dataset.test_fraction={fraction} is held out of all of "
            f"{shortened(map(str, train))}; set dataset.test_fraction=0"
        )
    return {*chosen} == {*train}
