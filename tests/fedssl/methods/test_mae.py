"""MAE: its loss, who receives gradients, what the encoder does not compute, the decoder in a federation, failures."""

import pytest
import torch

from fedssl.augmentation.patch_masks import MaskRecipe
from fedssl.config.load import compose
from fedssl.datasets.base import load_federated
from fedssl.errors import InputError
from fedssl.methods.base import build_method
from fedssl.methods.mae import MAE, equal_mask, explained_variance
from fedssl.model_arrays import exchanged_layers, exchanged_names, load_layers
from fedssl.schedule.stages import set_active_stages
from fedssl.seeding import torch_generator
from fedssl.step_cost import count_flops, step_cost
from fedssl.training import LocalTrainer, train
from fedssl.views import View, Views
from server_app.collapse_monitor import CollapseMonitor
from strategies.types import GLOBAL
from tests.federation import Federation
from tests.fedssl.methods.masked import masked_views, slow_prediction, vit
from tests.methods import overrides_of

RECIPE = MaskRecipe(kind="random", patch=2)  # 4 of 16 patches are visible
MAE_ON_DIGITS = overrides_of("mae")


def make_mae(*, normalize_patches: bool = True, exchange_decoder: bool = True, **kind) -> MAE:
    decoder = {"decoder_width": 12, "decoder_depth": 1, "decoder_heads": 3}
    return MAE(vit(**kind), normalize_patches=normalize_patches, exchange_decoder=exchange_decoder, **decoder)


def slow_loss(method: MAE, view: View) -> float:
    """Transcribe the paper in float64, one image, patch and pixel at a time; the decoder in the order of the image."""
    errors = []
    prefix = method.encoder.num_prefix_tokens
    for image, visible, targets in zip(view.images, view.mask.visible, view.mask.targets[:, 0], strict=True):
        tokens = method.encoder.forward_tokens(method.encoder.embed(image[None])[:, visible])[0]
        assert len(tokens) == prefix + len(visible)
        predicted = slow_prediction(method.decoder, tokens, visible, targets, side=4)
        for prediction, patch in zip(predicted, targets.tolist(), strict=True):
            row, column = 2 * (patch // 4), 2 * (patch % 4)
            pixels = image[0, row : row + 2, column : column + 2].flatten()
            if method.normalize_patches:
                pixels = (pixels - pixels.mean()) / (pixels.var(correction=1) + 1e-6).sqrt()
            errors += [(p - t) ** 2 for p, t in zip(prediction.tolist(), pixels.tolist(), strict=True)]
    assert len(errors) == 5 * 12 * 4  # images, hidden patches, pixels
    return sum(errors) / len(errors)


@pytest.mark.parametrize("kind", [{"pool": "token"}, {"pool": "mean"}, {"pool": "mean", "registers": 1}])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_is_its_transcription(kind, normalize):
    method = make_mae(normalize_patches=normalize, **kind).double()
    view = masked_views(RECIPE)[0]
    view = View(view.images.double(), mask=view.mask)
    assert method.loss(Views((view,))).item() == pytest.approx(slow_loss(method, view), rel=1e-9)


def test_only_visible_patches_affect_the_prediction():
    method = make_mae()
    view = masked_views(RECIPE)[0]
    shown = (~view.mask.hidden).view(-1, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    before, _ = method.predict(view)
    without, _ = method.predict(View(torch.where(shown, view.images, 7.0), mask=view.mask))
    assert torch.equal(before, without)
    changed, _ = method.predict(View(torch.where(shown, view.images + 1, view.images), mask=view.mask))
    assert (before - changed).abs().max() > 1e-3


def test_everything_is_trained_and_only_exchanged_layers_are():
    method = make_mae()
    method.loss(masked_views(RECIPE)).backward()
    assert set(method.trainable) == {name for name, p in method.named_parameters() if p.grad is not None}
    without_gradient = [name for name, p in method.named_parameters() if p.grad is not None and not p.grad.any()]
    # The attention of the last block is invariant to the bias of its keys; torch stores it with those of q and v.
    assert without_gradient == []
    assert set(exchanged_names(method)) == set(method.state_dict())
    assert {name.partition(".")[0] for name in exchanged_names(method)} == {"encoder", "decoder"}


def test_the_encoder_computes_nothing_for_hidden_patches():
    """Count the FLOPs of a forward pass: 2 per multiplication, for t tokens of width w in each block.

    Linear layers have 12 t w^2 (queries, keys and values 3, output 1, MLP 8), attention has 2 t^2 w (scores, sums).
    With 16 patches of 4 pixels, the encoder has 2 blocks of width 8 on t = 4 visible patches and a class token, and
    the decoder 1 block of width 12 on 5 tokens and 12 mask tokens.
    """
    method, views = make_mae(), masked_views(RECIPE)

    def blocks(tokens: int, width: int) -> int:
        return 12 * tokens * width**2 + 2 * tokens**2 * width

    embedding = 4 * 4 * 8
    decoder = 5 * 8 * 12 + blocks(17, 12) + 12 * 12 * 4  # embedding of the tokens, block, pixels
    with count_flops() as counter:
        method.loss(views)
    assert counter.get_total_flops() == 5 * 2 * (embedding + 2 * blocks(5, 8) + decoder)
    assert blocks(5, 8) < blocks(17, 8) / 3


def test_progressive_stages_train_and_hidden_ones_do_not_run():
    method, views = make_mae(depth=3), masked_views(RECIPE)
    with set_active_stages(method, depth=1):
        method.loss(views).backward()
    trained = {name for name, p in method.named_parameters() if p.grad is not None}
    assert any("encoder_layer_0" in name for name in trained)
    assert not any("encoder_layer_1" in name or "encoder_layer_2" in name for name in trained)


def test_explained_variance_by_hand():
    """Targets 0 and 2 have variance 1. Errors of 0; of the mean 1; of 3 are 9 and 1, of mean 5."""
    target = torch.tensor([[0.0], [2.0]])
    assert explained_variance(target, target) == 1
    assert explained_variance(torch.ones(2, 1), target) == 0
    assert explained_variance(torch.full((2, 1), 3.0), target) == 1 - 5
    assert explained_variance(torch.zeros(2, 1), torch.ones(2, 1)) == 0


def test_a_local_decoder_stays_with_its_client():
    method = make_mae(exchange_decoder=False)
    initial = {name: value.clone() for name, value in method.decoder.state_dict().items()}
    assert method.local_parts == ("decoder",)
    assert {name.partition(".")[0] for name in exchanged_layers(method)} == {"encoder"}
    assert method.failure_modes == ()
    with torch.no_grad():
        for parameter in method.decoder.parameters():
            parameter.add_(1)
    method.start_round(first=False)
    assert all(torch.equal(value, initial[name] + 1) for name, value in method.decoder.state_dict().items())
    method.start_round(first=True)
    assert all(torch.equal(value, initial[name]) for name, value in method.decoder.state_dict().items())


def test_calibration_needs_an_exchanged_decoder(tmp_path):
    overrides = [*MAE_ON_DIGITS, "strategy=fedavg", "calibration=auxiliary"]
    Federation(tmp_path / "exchanged", *overrides).run(1)
    with pytest.raises(InputError, match="calibration trains on the server, which does not have the clients' decoder;"):
        Federation(tmp_path / "local", *overrides, "method.exchange_decoder=false")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["encoder.patch=1"],
            "^method.normalize_patches=true .* encoder.patch=1 .* set method.normalize_patches=false",
        ),
        (["augmentation=digits"], "1 global view with a mask of kind random .*; set augmentation=mae$"),
        (["augmentation=ijepa"], "a mask of kind multi_block; set augmentation=mae$"),
        (["schedule=layer_wise"], "^the schedule or the tuning freezes stages .* MAE hides patches.*; set schedule="),
        (["compile=true"], "^compile=true compiles .* but MAE trains it on patches; set compile=false$"),
        (
            ["regularizer=decorr"],
            "Decorrelation needs the encoder's output for 2 whole views, which MAE does not compute",
        ),
        (["regularizer=fur"], "FUR needs the encoder's output for 2 whole views, which MAE does not compute"),
        (["strategy=fedu", "method.exchange_decoder=false"], "MAE exchanges neither; set strategy.predictor=global$"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(tmp_path, overrides, message):
    with pytest.raises(InputError, match=message):
        Federation(tmp_path, *MAE_ON_DIGITS, *overrides)


def failures_of(method, settings) -> tuple[str, ...]:
    views, device = settings.training.augmentation.instantiate(), torch.device("cpu")
    monitor = CollapseMonitor(method, data=settings.data, num_images=64, augment=views, device=device, seed=0)
    return monitor.finish({GLOBAL: exchanged_layers(method)}, used=()).failures


@pytest.mark.heavy
def test_a_decoder_that_ignores_the_image_is_reported():
    """With a learning rate of 0 nothing is learned; a few epochs with a usual one explain some of the pixels."""
    overrides = [*MAE_ON_DIGITS, "encoder.pool=mean", "dataset.limit=300", "threads=1"]
    overrides += ["optimizer=adam", "batch_size=16"]
    settings = compose([*overrides, "local_epochs=12", "optimizer.lr=3e-3"])
    method = build_method(settings.model)
    layers = exchanged_layers(method)
    (failure,) = failures_of(method, settings)
    assert failure.startswith("global model: the decoder predicts hidden patches no better than their mean over images")
    load_layers(method, layers)
    training = LocalTrainer.build(settings.training, method)
    images = load_federated(settings.data).images
    train(method, images, torch.arange(300), training=training, generator=torch_generator(0, "t"))
    assert failures_of(method, settings) == ()


def test_diagnosis_hides_the_same_patches_of_all_images():
    """Predictions of different patches would differ without any information of the image."""
    method, views = make_mae(pool="mean"), masked_views(RECIPE)
    mask = equal_mask(views[0].mask)
    assert mask.hidden.shape == (5, 16)
    assert (mask.visible == views[0].mask.visible[0]).all()
    assert (mask.targets == views[0].mask.targets[0]).all()
    with torch.no_grad():
        method.decoder.output.weight.zero_()
        method.decoder.output.bias.zero_()
    # The prediction is 0: 1 - mean(t^2) / mean((t - m)^2), with standardized targets.
    pixels = views[0].images.unfold(2, 2, 2).unfold(3, 2, 2).reshape(5, 16, 4).double()[:, mask.targets[0, 0]]
    t = (pixels - pixels.mean(2, keepdim=True)) / (pixels.var(2, keepdim=True) + 1e-6).sqrt()
    expected = 1 - t.square().mean() / (t - t.mean(0)).square().mean()
    assert method.diagnose(views)["explained_variance"] == pytest.approx(expected.item(), rel=1e-5)


def test_the_patches_of_masks_are_those_of_the_encoder(tmp_path):
    views = "augmentation.views=[{mask: {kind: random, patch: 4, ratio: 0.5}}]"
    sentence = "^augmentation.views.0.mask.patch=4 but encoder.patch=2; leave augmentation.views"
    with pytest.raises(InputError, match=sentence):
        Federation(tmp_path, *MAE_ON_DIGITS, views)


@pytest.mark.parametrize("name", ["mae", "ijepa"])
def test_clients_with_one_image_train(tmp_path, name):
    """Patches of an image predict each other."""
    overrides = [*overrides_of(name), "dataset.limit=3", "strategy=fedavg"]
    federation = Federation(tmp_path, *overrides)
    before = federation.method.state_dict()["encoder.conv_proj.weight"].clone()
    layers = federation.run(1)
    assert [row.examples for row in federation.report.clients] == [1, 1, 1]
    assert not torch.equal(torch.from_numpy(layers["encoder.conv_proj.weight"]), before)
    method = build_method(federation.settings.model)
    training = LocalTrainer.build(federation.settings.training, method)
    cost, costs = (
        step_cost(method, images=torch.zeros(number, 1, 8, 8, dtype=torch.uint8), training=training)
        for number in (1, 4)
    )
    assert cost.flops_per_image == pytest.approx(costs.flops_per_image, rel=0.5)  # I-JEPA draws the sizes of masks
