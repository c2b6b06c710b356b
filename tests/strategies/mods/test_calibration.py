"""Training on images of the server, of which `tests/fedssl/schedule` has the rounds and the stages."""

import numpy as np

from tests.federation import Federation


def test_calibration_has_no_regularizer(tmp_path):
    """Clients that do not train return what they got: all that changes comes from the server's images."""
    overrides = ["strategy=fedavg", "calibration=auxiliary", "calibration.epochs=1", "rounds=1", "local_epochs=0"]
    plain, regularized = (
        Federation(tmp_path / name, *overrides, f"regularizer={name}").run(1) for name in ("none", "fur")
    )
    weight = "encoder.blocks.0.0.weight"
    np.testing.assert_array_equal(regularized[weight], plain[weight])
