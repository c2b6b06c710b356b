"""A task gives the settings that the full text gives, whatever is chosen, and takes nothing that is not plain."""

import json

import pytest

from fedssl.config.device_task import compose_task, make_task
from fedssl.config.load import compose, parse_client_config
from fedssl.config.overrides import CONF
from fedssl.config.typed_settings import training_components
from fedssl.errors import InputError, RequestRefused
from tests.cases import some

EXPERIMENTS = [  # all that lie in no folder of a paper, and one of each paper
    *sorted(file.stem for file in (CONF / "experiment").glob("*.yaml")),
    *("l_dawa/table2", "fedu/table4", "fedu2/table1", "dec_ssl/figure5", "lw_fedssl/fll", "lw_fedssl/lw_fedssl"),
]
MIXED = [
    ["strategy=fedprox", "regularizer.weight=1", "method=fedu2/byol", "optimizer=adam", "optimizer.fused=true"],
    ["strategy=l_dawa_fedu", "method=original/moco_v3_resnet", "encoder=resnet18", "clip_norm=3", "precision=bf16"],
    ["schedule=layer_wise", "schedule.rounds_per_stage=left_skewed", "rounds=6", "regularizer=alignment"],
    ["encoder=vit_tiny", "encoder.depth=2", "augmentation=byol", "method=orchestra", "method.target_init=reset"],
    [
        "method=byol",
        "method.predictor.out_dim=64",
        "method.projector.out_dim=64",
        "channels_last=false",
        "seed=123456789012",
    ],
    ["tuning=lora", "tuning.rank=4", "tuning.alpha=16", "tuning.targets=[in_proj,mlp.0]", "encoder=vit_tiny"],
    ["tuning=last_blocks", "tuning.blocks=2"],
    ["tuning=adapter", "tuning.bottleneck=4"],
    [
        "augmentation.views=[{flip_prob: 1.0}, {crop_scale: [0.5, 1.0], pad: 2}]",
        "dataset.mean=[0,0.1,1]",
        "dataset.size=48",
    ],
]
WORDS = [*([f"experiment={name}"] for name in EXPERIMENTS), *MIXED]
DEFAULT = [MIXED[0], MIXED[-1]]


@pytest.mark.parametrize("overrides", some(WORDS, default=DEFAULT), ids=" ".join)
def test_a_task_gives_the_settings_that_the_full_text_gives(overrides):
    data = [] if any(word.startswith("experiment") for word in overrides) else ["dataset=cifar10"]
    settings = compose([*overrides, *data, "output_dir=/runs/1"])
    full = parse_client_config(settings.client_yaml)
    composed = compose_task(make_task(settings).text())
    assert training_components(composed) == (full.model, full.training, full.strategy)
    assert composed.seed == full.seed
    assert (composed.dataset.channels, composed.dataset.size) == (full.data.channels, full.data.size)
    assert (tuple(composed.dataset.mean), tuple(composed.dataset.std)) == (full.data.mean, full.data.std)


def test_a_task_says_nothing_of_the_machine_or_the_images():
    overrides = ["dataset=cifar10", "dataset.path=/secret", "output_dir=/runs/1", "threads=3", "method=fedca"]
    text = make_task(compose([*overrides, "method.alignment_weight=0.1", "teacher=/secret/encoder.pt"])).text()
    assert not any(word in text for word in ("secret", "/runs", "threads", "_target_", "hub", "cuda", "cache"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["+optimizer.nesterov=true"], "edge clients would reject this run: there is no setting 'optimizer.nesterov'"),
        (["optimizer._target_=torch.optim.RMSprop"], "a _target_ was changed or a node deleted"),
        (["method.projector=null"], "edge clients would reject this run: there is no setting 'method.projector'"),
    ],
)
def test_what_devices_cannot_be_told_is_refused_by_the_server(overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        make_task(compose(overrides))


NOT_PLAIN = [
    ("encoder.width", "wide", "encoder.width=wide must be an integer from 1 to 65536; the default is 32"),
    ("encoder.width", 1.5, "encoder.width=1.5 must be an integer from 1 to 65536; the default is 32"),
    ("encoder.width", True, "encoder.width=true must be an integer from 1 to 65536; the default is 32"),
    ("encoder.width", 2**20, "encoder.width is beyond 65536"),
    ("encoder.width", -(2**20), "encoder.width is beyond 65536"),
    ("method.projector.num_layers", 1000, "method.projector.num_layers is beyond 256"),
    ("optimizer.lr", float("inf"), "optimizer.lr is inf, which is not finite"),
    ("clip_norm", "${x}", "clip_norm has an interpolation"),
    ("optimizer.fused", {"_target_": "os.mkdir"}, "optimizer.fused has the key '_target_'"),
    (
        "augmentation.views",
        [{"flip_prob": {"_target_": "os.mkdir"}}, {}],
        "augmentation.views.0.flip_prob has the key '_target_'",
    ),
    ("augmentation.views", [[[[[[1]]]]]], "nested more than 4 deep"),
    ("augmentation.views", [0] * 5000, "augmentation.views is longer than 4096 values"),
    ("dataset.mean", ["a", "b", "c"], r"dataset.mean=\['a', 'b', 'c'\] must be a list of numbers from -100000 to"),
    ("dataset.std", [0, 1, 1], r"dataset.std=\[0, 1, 1\] must be a list of numbers above 0 and at"),
    ("dataset.channels", 65, "dataset.channels=65 must be at most 64; the default is 3"),
    ("dataset.path", "/etc", "there is no setting 'dataset.path' that a server may set"),
    ("dataset._target_", "os.mkdir", "there is no setting 'dataset._target_'"),
    ("augmentation._target_", "os.mkdir", "there is no setting 'augmentation._target_'"),
    ("method.projector._partial_", False, "there is no setting 'method.projector._partial_'"),
    ("threads", 10**6, "there is no setting 'threads'"),
    ("device", "cuda", "there is no setting 'device'"),
    ("output_dir", "/tmp/x", "there is no setting 'output_dir'"),
    ("encoder", {"_target_": "os.mkdir"}, "there is no setting 'encoder'"),
    ("run_id", "../x", "run_id='../x' is not a valid run id"),
    ("run_id", 5, "run_id='5' is not a valid run id"),
    ("local_epochs", -1, "local_epochs=-1 must be an integer of at least 0; the default is 5"),
    ("rounds", 10**7, "rounds is beyond 1000000"),
    ("seed", -1, "seed=-1 must be an integer of at least 0; the default is 0"),
    ("precision", "fp8", "precision=fp8 must be fp32 or bf16; the default is fp32"),
]


@pytest.fixture(scope="module")
def task_text():
    return make_task(compose(["dataset=cifar10"])).text()


@pytest.mark.parametrize(("key", "value", "sentence"), NOT_PLAIN)
def test_what_is_not_plain_is_refused(key, value, sentence, task_text):
    task = json.loads(task_text)
    task["values"][key] = value
    with pytest.raises(RequestRefused, match=sentence):
        compose_task(json.dumps(task))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seed: 0\nencoder:\n  _target_: os.mkdir\n", "the task is not JSON"),
        ("[" * 50_000, "the task is not JSON"),
        ("1" * 10_000, "the task is not JSON"),
        ("[]", "must have the keys choices and values"),
        ('{"choices": {}, "values": []}', "must each be a mapping"),
        ('{"choices": {}, "values": {}}', "the task must choose in augmentation, encoder, .* and in nothing else"),
        (" " * 70_000, "longer than 65536 characters"),
    ],
)
def test_what_is_no_task(text, sentence):
    with pytest.raises(RequestRefused, match=sentence):
        compose_task(text)


@pytest.mark.parametrize("name", ["none", "../../method/byol", "byol.yaml", ["byol"], None, "byol optimizer=adam"])
def test_a_choice_that_the_device_does_not_have(name):
    task = json.loads(make_task(compose([])).text())
    task["choices"]["method"] = name
    with pytest.raises(RequestRefused, match="is not a choice of this edge client"):
        compose_task(json.dumps(task))
