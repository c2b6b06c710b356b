"""All rules about a run, which are checked before its folder exists.

Each stands beside the feature that needs it. Those about the encoder, the method and the schedule are here.
"""

from collections.abc import Sequence

from fedssl.config.settings import Settings
from fedssl.rules import Problem, Rule
from server_app import (
    client_states,
    devices,
    evaluator,
    federation,
    initial_weights,
    policies,
)
from server_app.callbacks import early_stopping
from server_app.exchanges import secure, virtual_time
from strategies.mods import MODS
from strategies.mods.base import Mod
from strategies.rules import RoundExchange, RunParts, strategy_supports_run, weights_by_loss_have_losses


def encoder_has_size_of_images(settings: Settings) -> Problem:
    """Require an encoder for the size of the images."""
    size, data_size = settings.model.encoder.values.get("size"), settings.data.size
    if size is None or size == data_size:
        return None
    return (
        f"encoder.size={size} but dataset.size={data_size}, which it follows; leave encoder.size out, or set "
        f"dataset.size={size}"
    )


def views_have_statistics_of_images(settings: Settings) -> Problem:
    """Require views that are standardized as the images of evaluations and of the exported encoder."""
    values, data = settings.training.augmentation.values, settings.data
    for key, of_images in (("mean", data.mean), ("std", data.std)):
        of_views = list(values.get(key) or of_images)
        if of_views * (len(of_images) if len(of_views) == 1 else 1) != list(of_images):
            return (
                f"augmentation.{key}={of_views} but encoders are evaluated and exported with dataset.{key}="
                f"{list(of_images)}; set dataset.{key} to the value of the training, and write "
                f"{key}: ${{dataset.{key}}} in a file of augmentation"
            )
    return None


def batches_suffice(parts: RunParts) -> Problem:
    """Require batches that are large enough for the method."""
    batch_size, smallest = parts.settings.training.batch_size, parts.method.min_batch_size
    if batch_size >= smallest:
        return None
    return (
        f"batch_size={batch_size} but {type(parts.method).__name__} needs batches of at least {smallest} images; "
        f"set batch_size={smallest} or more, better 64"
    )


def compiled_encoder_is_trained(parts: RunParts) -> Problem:
    """Refuse to compile an encoder whose ``forward`` is not used in training."""
    method = parts.method
    if not (parts.settings.machine.compile_encoder and method.masks_patches):
        return None
    if "encoder" in method.regularized_parts:
        return None
    return (
        f"compile=true compiles the encoder for whole images, but {type(method).__name__} trains it on patches; "
        "set compile=false"
    )


def regularizer_has_its_input(parts: RunParts) -> Problem:
    """Refuse a schedule that freezes trained stages whose input the regularizer needs."""
    phases = parts.context.phases
    freezes = len(phases) > 1 and any(phase.frozen for phase in phases)
    needing = [type(term).__name__ for term in parts.regularizer.terms if not term.supports_frozen_stages]
    if not freezes or not needing:
        return None
    return (
        f"{needing[0]} compares representations of images, but the schedule freezes trained "
        "stages and trains on their output; set schedule=end_to_end or schedule=progressive, or another regularizer "
        "or strategy"
    )


def phases_stay(parts: RunParts) -> Problem:
    """Refuse another number of rounds of a resumed run with several phases, which depend on it."""
    recording, rounds = parts.settings.recording, parts.settings.rounds
    if recording.resumed in (None, rounds) or len(parts.context.phases) == 1:
        return None
    return (
        f"resume={recording.folder} was run with rounds={recording.resumed} (now {rounds}); keep the "
        "number, or start a new run"
    )


SETTINGS_RULES: Sequence[Rule[Settings]] = (
    *initial_weights.SETTINGS_RULES,
    encoder_has_size_of_images,
    views_have_statistics_of_images,
    *policies.SETTINGS_RULES,
    *secure.SETTINGS_RULES,
    *(rule for mod in MODS for rule in mod.settings_rules),
    *federation.SETTINGS_RULES,
)

COST_RULES: Sequence[Rule[Settings]] = secure.COST_RULES  # about what an estimate of the cost covers

RUN_RULES: Sequence[Rule[RunParts]] = (
    *initial_weights.RUN_RULES,
    strategy_supports_run,
    weights_by_loss_have_losses,
    batches_suffice,
    compiled_encoder_is_trained,
    regularizer_has_its_input,
    phases_stay,
    *policies.RUN_RULES,
    *(rule for mod in MODS for rule in mod.run_rules),
    *secure.RUN_RULES,
    *devices.RUN_RULES,
    *client_states.RUN_RULES,
    *evaluator.RUN_RULES,
    *early_stopping.RUN_RULES,
    *virtual_time.RUN_RULES,
)


def round_rules(settings: Settings, mods: Sequence[Mod]) -> Sequence[Rule[RoundExchange]]:
    """Return the rules about what the clients of a round exchange, of the features that the run uses."""
    return (
        *(policies.ROUND_RULES if settings.aggregation.buffered else ()),
        *(rule for mod in mods for rule in mod.round_rules),
        *secure.round_rules(settings),
    )
