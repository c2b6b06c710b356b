"""I-JEPA: its loss, the target encoder, schedules over rounds, the predictor in a federation, and collapse."""

import pytest
import torch

from fedssl.augmentation.patch_masks import MaskRecipe
from fedssl.config.load import compose
from fedssl.errors import InputError
from fedssl.methods.base import build_method
from fedssl.methods.ijepa import IJEPA, feature_variances
from fedssl.model_arrays import exchanged_names
from fedssl.training import LocalTrainer
from fedssl.views import View, Views
from tests.federation import Federation
from tests.fedssl.methods.masked import masked_views, slow_prediction, vit
from tests.methods import overrides_of
from tests.states import load_tensors

RECIPE = MaskRecipe(kind="multi_block", patch=1)
ON_DIGITS = overrides_of("ijepa")


def make_ijepa(*, ema_decay=0.9, ema_schedule="constant", target_init="persist", exchange_predictor=True, **kind):
    sizes = {"predictor_width": 12, "predictor_depth": 1, "predictor_heads": 3}
    options = {"ema_schedule": ema_schedule, "target_init": target_init, "exchange_predictor": exchange_predictor}
    return IJEPA(vit(patch=1, **kind), ema_decay=ema_decay, **sizes, **options)


@torch.no_grad()
def differ(method: IJEPA) -> IJEPA:
    """Move the target away from the online encoder, and the predictor from its initial weights."""
    generator = torch.Generator().manual_seed(5)
    for network in (method.target_encoder, method.predictor):
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return method


def slow_loss(method: IJEPA, view: View) -> float:
    """Transcribe the paper with the authors' loss, one image, block and patch at a time, in float64."""
    mask, prefix = view.mask, method.encoder.num_prefix_tokens
    distances = []
    for image, visible, blocks in zip(view.images, mask.visible, mask.targets, strict=True):
        context = method.encoder.forward_tokens(method.encoder.embed(image[None])[:, visible])[0]
        target = method.target_encoder.forward_tokens(method.target_encoder.embed(image[None]))[0, prefix:]
        for block in blocks:
            predicted = slow_prediction(method.predictor, context, visible, block, side=8)
            for prediction, patch in zip(predicted, block.tolist(), strict=True):
                t = target[patch]
                t = (t - t.mean()) / (t.var(correction=0) + 1e-5).sqrt()
                distances += [d**2 / 2 if d < 1 else d - 1 / 2 for d in (prediction - t).abs().tolist()]
    return sum(distances) / len(distances)


@pytest.mark.parametrize("kind", [{"pool": "token"}, {"pool": "mean"}])
def test_the_loss_is_its_transcription(kind):
    method = differ(make_ijepa(**kind).double())
    view = masked_views(RECIPE, batch=3)[0]
    assert view.mask.targets.shape[1] == 4
    view = View(view.images.double(), mask=view.mask)
    assert method.loss(Views((view,))).item() == pytest.approx(slow_loss(method, view), rel=1e-8)


def test_contexts_lack_targets_and_the_target_encoder_sees_all():
    method = differ(make_ijepa(pool="mean"))
    views = masked_views(RECIPE)
    view = views[0]
    shown = (~view.mask.hidden).view(-1, 1, 8, 8)
    seen, features = [], method.target_features(view.images)
    method.predictor.register_forward_hook(lambda module, inputs, output: seen.append(output))
    method.loss(views)
    changed = View(torch.where(shown, view.images, 3.0), mask=view.mask)  # pixels outside of the context
    method.loss(Views((changed,)))
    assert torch.equal(*seen)
    others = (method.target_features(changed.images) - features).abs().amin(dim=2)
    assert (others > 1e-5).all()  # every patch attends to every other


def test_encoder_and_predictor_are_trained_and_the_target_is_not():
    method = make_ijepa()
    method.loss(masked_views(RECIPE)).backward()
    with_gradient = {name for name, p in method.named_parameters() if p.grad is not None}
    assert with_gradient == set(method.trainable)
    assert {name.partition(".")[0] for name in with_gradient} == {"encoder", "predictor"}


def test_a_step_has_the_decay_of_its_round():
    method = make_ijepa(ema_decay=0.5, ema_schedule="cosine")
    method.rounds, method.round = 5, 3  # halfway between 0.5 and 1
    assert method.step_constants == pytest.approx((0.75,))


@pytest.mark.parametrize("init", ["persist", "reset", "average"])
def test_the_target_at_the_start_of_a_round(init):
    method = differ(make_ijepa(target_init=init))

    def is_copy() -> bool:
        pairs = zip(method.encoder.parameters(), method.target_encoder.parameters(), strict=True)
        return all(torch.equal(online, target) for online, target in pairs)

    method.start_round(first=False)
    assert is_copy() == (init == "reset")
    method.start_round(first=True)
    assert is_copy() == (init != "average")
    exchanged = {name.partition(".")[0] for name in exchanged_names(method)}
    assert exchanged == {"encoder", "predictor"} | ({"target_encoder"} if init == "average" else set())


def test_a_local_predictor_continues_from_its_own_weights():
    initial = {name: value.clone() for name, value in make_ijepa().predictor.state_dict().items()}
    method = differ(make_ijepa(exchange_predictor=False))
    assert method.local_parts == ("target_encoder", "predictor")
    trained = {name: value.clone() for name, value in method.predictor.state_dict().items()}
    method.start_round(first=False)
    assert all(torch.equal(value, trained[name]) for name, value in method.predictor.state_dict().items())
    method.start_round(first=True)
    assert all(torch.equal(value, initial[name]) for name, value in method.predictor.state_dict().items())
    shared = make_ijepa(exchange_predictor=False, target_init="average")
    assert shared.local_parts == ("predictor",)


def test_targets_stay_with_their_clients(tmp_path):
    Federation(tmp_path, *ON_DIGITS, "strategy=fedavg", "num_clients=2", "optimizer.lr=0.1").run(1)
    states = [load_tensors(folder, before=2) for folder in sorted(tmp_path.glob("clients/0000/*"))]
    assert all({name.partition(".")[0] for name in state} == {"target_encoder"} for state in states)
    assert not any(torch.equal(states[0][name], states[1][name]) for name in states[0] if name.endswith("weight"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["augmentation=digits"], "1 global view with a mask of kind multi_block .*; set augmentation=ijepa$"),
        (["augmentation=digits_mae"], "a mask of kind random; set augmentation=ijepa$"),
        (["schedule=layer_wise"], "^the schedule or the tuning freezes stages .* IJEPA hides patches.*; set schedule="),
        (["regularizer=decorr"], "Decorrelation needs the encoder's output for 2 whole views, which IJEPA does not"),
        (
            ["strategy=fedu", "method.exchange_predictor=false"],
            "IJEPA exchanges neither; set strategy.predictor=global$",
        ),
        (
            ["calibration=auxiliary", "method.exchange_predictor=false"],
            "does not have the clients' predictor; .*=true$",
        ),
        (["method.predictor_width=18"], "^method.predictor_width=18 must be a multiple of 4 and of method.predictor_h"),
        (["method.ema_schedule=line"], "^method.ema_schedule=line must be constant or cosine"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(tmp_path, overrides, message):
    with pytest.raises(InputError, match=message):
        Federation(tmp_path, *ON_DIGITS, "strategy=fedavg", *overrides)


def test_steps_are_not_captured():
    """The sizes of contexts and targets differ between batches."""
    settings = compose([*ON_DIGITS, "cuda_graphs=true", "optimizer.fused=true"])
    method = build_method(settings.model)
    with pytest.raises(InputError, match="the steps of IJEPA differ with these settings; set cuda_graphs=false"):
        LocalTrainer.build(settings.training, method)
    shapes = {masked_views(RECIPE, batch=8, seed=seed)[0].mask.visible.shape[1] for seed in range(40)}
    assert len(shapes) > 5


def test_variances_by_hand():
    """Features (1, -1) or (-1, 1) are standardized already.

    Two images with two patches: the first patch is the same in both images, the second one differs. Over images the
    variances are 0 and 1, over the patches of the first image 0 and of the second one 1.
    """
    up, down = torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0])
    features = torch.stack((torch.stack((up, up)), torch.stack((up, down))))
    assert feature_variances(features) == pytest.approx((0.5, 0.5), rel=1e-4)
    assert feature_variances(5 * features + 2) == pytest.approx((0.5, 0.5), rel=1e-4)
    assert feature_variances(features[:1].expand(3, -1, -1))[0] == 0
    assert feature_variances(features[:, :1].expand(-1, 3, -1))[1] == 0
    assert feature_variances(torch.stack((up.expand(2, 2), down.expand(2, 2)))) == pytest.approx((1, 0), rel=1e-4)
