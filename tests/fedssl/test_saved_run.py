"""What a run folder says of its settings is proven before it is used."""

import pytest

from fedssl.config import compose
from fedssl.errors import InputError
from fedssl.saved_run import read_settings, read_words

GOOD = compose(["seed=3"]).recording.text


@pytest.fixture
def file(tmp_path):
    return tmp_path / "config.yaml"


def test_what_is_not_there_is_none(file):
    assert read_settings(file) is None
    assert read_words(file) is None


def test_what_a_run_saved_is_read(file):
    file.write_text(GOOD)
    settings = read_settings(file)
    assert (settings.seed, settings.dataset.size) == (3, 8)
    file.write_text("- seed=3\n- strategy=fedavg\n")
    assert read_words(file) == ["seed=3", "strategy=fedavg"]


@pytest.mark.parametrize("text", ["seed: 3", "- 3", "- [a]"])
def test_words_are_a_list_of_text(file, text):
    file.write_text(text)
    with pytest.raises(InputError, match=r"config\.yaml"):
        read_words(file)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("seed: 3\n", "", "does not hold the settings of a run"),
        ("seed: 3\n", "seed: three\n", "does not hold the settings of a run"),
        ("seed: 3\n", "seed: ${rounds}\n", "does not hold the settings of a run"),
        ("batch_size: 64\n", "batch_size: ${oc.env:HOME}\n", "an interpolation"),
        ("seed: 3\n", "seed: [3\n", "no YAML"),
        ("  size: 8\n", "  size: large\n", "dataset.size is missing or of the wrong kind"),
        ("  channels: 1\n", "", "dataset.channels is missing or of the wrong kind"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(file, old, new, reason):
    place = GOOD.index(old, GOOD.index("\ndataset:") if old.startswith(" ") else 0)
    file.write_text(GOOD[:place] + new + GOOD[place + len(old) :])
    with pytest.raises(InputError, match=reason):
        read_settings(file)
