"""examples/theory.py: minimizers against their objectives, by hand, and the trends that the paper proves."""

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.optimize import minimize

spec = importlib.util.spec_from_file_location("theory", Path(__file__).parents[2] / "examples" / "theory.py")
theory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(theory)


def eq_3_1(features, sources):
    """Eq. 3.1, averaged over sources, image by image; augmentations are independent of each other, with mean 0."""
    aligned = [np.mean([(features @ x) @ (features @ x) for x in images]) for images in sources]
    return -np.mean(aligned) + 0.5 * np.linalg.norm(features.T @ features) ** 2


def test_self_supervised_features_minimize_the_objective():
    generator = np.random.default_rng(0)
    sources = [generator.normal(size=(30, 6)) * [3, 1, 2, 1, 1, 1], generator.normal(size=(30, 6)) * [1, 3, 1, 1, 1, 1]]
    features = theory.self_supervised(sources, width=3)
    least = eq_3_1(features, sources)

    def objective(flat):
        return eq_3_1(flat.reshape(3, 6), sources)

    slow = min(minimize(objective, generator.normal(size=18)).fun for _ in range(3))
    assert slow == pytest.approx(least, rel=1e-6)
    # By hand: S has eigenvalues l_1 >= l_2 >= ..., and -sum l_i a_i + a_i^2 / 2 is least for a_i = l_i.
    moment = sum(images.T @ images for images in sources) / 60
    assert least == pytest.approx(-0.5 * np.square(np.linalg.eigvalsh(moment)[-3:]).sum())


def test_what_the_paper_proves(tmp_path, capsys):
    dims = [64, 256]
    assert theory.main(["--dims", "64", "256", "--seeds", "2", "--sources", "3", "--folder", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "theory.csv").read_text().splitlines()))
    assert len(rows) == 2 * 2 * 3 * 3
    assert Image.open(tmp_path / "theory.png").size[0] > 1000

    def mean(kind, column, dim, *, own):
        chosen = [row for row in rows if (row["features"], int(row["dim"])) == (kind, dim)]
        return np.mean([float(row[column]) for row in chosen if (row["direction"] == "1") == own])

    for dim in dims:
        missing = [1 - mean("local SSL", "representability", dim, own=False)]
        missing += [1 - mean("global SSL", "representability", dim, own=own) for own in (True, False)]
        assert max(missing) * dim**0.8 < 2  # Theorem 3.2
        assert mean("local SL", "representability", dim, own=False) < 0.3
        assert mean("local SL", "correlation", dim, own=True) > 0.8  # Proposition 4.1
    small, large = (mean("local SL", "correlation", dim, own=False) for dim in dims)
    assert large < small < 0.3
    assert "smallest that holds in every draw" in capsys.readouterr().out
    again = tmp_path / "again"
    again.mkdir()
    theory.main(["--dims", "64", "--seeds", "2", "--sources", "3", "--folder", str(again)])
    assert (tmp_path / "theory.csv").read_text().startswith((again / "theory.csv").read_text())


@pytest.mark.parametrize("words", [["--sources", "1"], ["--dims", "8"], ["--seeds", "0"], ["--folder", "/no/such"]])
def test_invalid_settings_are_rejected_in_one_sentence(words, capsys):
    assert theory.main(words) == 2
    assert capsys.readouterr().err.startswith("theory: --sources ")
