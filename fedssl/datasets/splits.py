"""Splits in the names of files and folders, recognized by the words of Hugging Face's ``datasets``.

A name is that of a split if it contains a word of exactly one split, in any case, between the ends of the name and the
characters ``- . _``, spaces and digits: ``Training``, ``seg_test``, ``val2017``. ``unlabeled`` is a word, too. A
capital letter that follows is a domain: ``trainA`` and ``testB``, as of CycleGAN.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from fedssl.errors import InputError, shortened
from fedssl.logs import log_once

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
    "unlabeled": ("unlabeled",),
}
_SPLITS = {word: split for split, words in _WORDS.items() for word in words}
_PATTERN = re.compile(rf"(?<![^-._ 0-9])((?i:{'|'.join(_SPLITS)}))((?<=[a-z])[A-Z])?(?![^-._ 0-9])")
_SHARD = re.compile(r"(.+)-\d+-of-\d+")  # file names of the Hub
HELD_OUT = ("test", "validation")  # splits that are not for training; the first that exists is the test
Part = TypeVar("Part")


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


def chosen_parts(
    names: Mapping[Part, str], kinds: Mapping[Part, str | None], *, split: str, fraction: float
) -> tuple[list[Part], bool]:
    """Return the parts of a data set that are a split, and whether a test share is held out of them.

    A part, such as a file, has a name, and the split in it, None if it names none. If no part has a split, all are for
    training.
    """
    shared = fraction > 0 and not {*kinds.values()} & {*HELD_OUT}
    wanted = "train" if shared and split_of_word(split) in HELD_OUT else split
    chosen, train = (_parts_of(each, names, kinds) for each in (wanted, "train"))
    return chosen, shared and is_held_out_of(chosen, train, split=split, fraction=fraction)


def _parts_of(split: str, names: Mapping[Part, str], kinds: Mapping[Part, str | None]) -> list[Part]:
    # A folder may hold further splits that begin with the same word (train_0).
    exact = [part for part, name in names.items() if split.lower() in (name.lower(), shard_of(name))]
    if exact:
        return exact
    kind = split_of_word(split)
    if kind is None:
        word = re.compile(rf"(?<![a-z]){re.escape(split.lower())}(?![a-z])")
        return [part for part, name in names.items() if word.search(name.lower())]
    if kind == "train" and not any(kinds.values()):
        return list(names)
    for served in HELD_OUT if split == "test" else (kind,):
        found = [part for part in names if kinds[part] == served]
        if found:
            if served != kind:
                log_once(logging.INFO, f"{shortened(sorted({names[part] for part in found}))} serves as the test")
            return found
    return []


def shard_of(name: str) -> str | None:
    """Return what the name of a file of the Hub begins with, such as "train" of train-00000-of-00001.parquet."""
    shard = _SHARD.match(name.rpartition("/")[2].lower())
    return None if shard is None else shard[1]


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
