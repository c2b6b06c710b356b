"""Settings that do not fit each other."""

import pytest
import torch

from fedssl.errors import InputError
from fedssl.seeding import torch_generator
from tests.federation import Federation


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["encoder.size=16"], "encoder.size=16 but dataset.size=8, which it follows; leave encoder.size out, or set"),
        (
            ["augmentation.mean=[0.9]"],
            "augmentation.mean=.0.9. but encoders are evaluated and exported with dataset.mean=",
        ),
        (
            ["augmentation.std=[0.9]"],
            "augmentation.std=.0.9. but encoders are evaluated and exported with dataset.std=",
        ),
    ],
)
def test_what_does_not_fit_the_images_is_refused(tmp_path, overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        Federation(tmp_path, *overrides)


@pytest.mark.parametrize("overrides", [[], ["augmentation.mean=[0.4]"], ["dataset.channels=3"]])
def test_views_follow_the_statistics_of_the_images(tmp_path, overrides):
    statistics = ["dataset.mean=[0.4]", "dataset.std=[0.2]"]
    settings = Federation(tmp_path, "augmentation=none", *statistics, *overrides).settings
    images = torch.full((2, settings.data.channels, 8, 8), 102, dtype=torch.uint8)
    images[1] = 153
    for view in settings.training.augmentation.instantiate()(images, torch_generator(0)):
        torch.testing.assert_close(view.images, torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(images.shape))


@pytest.mark.parametrize("overrides", [["strategy=loss_weighted"], ["strategy=l_dawa", "strategy.weighting=loss"]])
def test_weights_by_loss_need_a_local_epoch(tmp_path, overrides):
    with pytest.raises(InputError, match=f"^{overrides[0]} weights .* losses .* set local_epochs=1 or more"):
        Federation(tmp_path, *overrides, "local_epochs=0")
    Federation(tmp_path, "strategy=l_dawa", "local_epochs=0")
