"""Federated statistics: the pooled numbers on every way, what a run keeps of them, and clients that send wrong ones."""

import logging

import numpy as np
import pytest
import torch
import yaml
from flwr.clientapp import ClientApp
from PIL import Image

from client_app import handlers
from client_app.app import app as client_app
from fedssl.config.load import compose, load_settings
from fedssl.datasets.base import load_federated
from fedssl.errors import InputError, RunError
from fedssl.export import load_encoder
from fedssl.fleet.history import read_history
from fedssl.report.accuracy_table import sweep_results
from fedssl.runs.groups import group_by_seed
from fedssl.runs.run import read_run
from fedssl.statistics.exchange import LAYER, answer
from fedssl.statistics.sums import DTYPES
from fedssl.wire.records import EXACT
from server_app.build import build_components
from server_app.statistics import with_statistics
from simulation.grid import LocalGrid, simulated_clients
from simulation.run import run
from strategies.mods.privacy import Privacy, epsilon
from tests.devices import Devices, context, run_server_app, write_images
from tests.runs import read_summary

SMALL = ["num_clients=4", "rounds=1", "local_epochs=1", "dataset.limit=60", "partition=iid", "encoder.width=4"]
SMALL += ["threads=1", "evaluate_every=0", "final_evaluation=none", "collapse_images=0", "measure_resources=false"]
REQUEST = [*SMALL, "dataset.mean=federated"]
UNIFORM = ["strategy=fedavg", "strategy.weighting=uniform"]
PRIVATE = [*UNIFORM, "privacy=central", "encoder.norm=group"]


def measured(*overrides, change=lambda client, content: None, asked=None):
    """The settings of a run after its clients have been asked. ``change`` changes the answer of a client."""
    settings = compose([*REQUEST, *overrides])
    app = ClientApp()

    @app.query("statistics")
    def reply(message, context):
        client = context.node_config["partition-id"]
        if asked is not None:
            asked.append(client)
        sent = client_app(message, context)
        change(client, sent.content)
        return sent

    components = build_components(settings, simulated_clients(settings.num_clients))
    return with_statistics(components, lambda: LocalGrid(app, num_clients=settings.num_clients)).settings


def pooled(*overrides):
    """Mean and standard deviation of all pixels in float64."""
    images = load_federated(compose([*SMALL, *overrides]).data).images
    values = images[torch.arange(len(images))].numpy().astype(np.float64) / 255
    return values.mean(axis=(0, 2, 3)), values.std(axis=(0, 2, 3))


def agrees(data, expected, atol=1e-12):
    np.testing.assert_allclose(data.mean, expected[0], rtol=0, atol=atol)
    np.testing.assert_allclose(data.std, expected[1], rtol=0, atol=atol)


def layer_of(content):
    return EXACT.decode(content.array_records["arrays"])[LAYER]


def set_layer(content, layer):
    content.array_records["arrays"] = EXACT.encode({LAYER: layer})


def test_a_run_has_the_pooled_statistics_everywhere(tmp_path):
    """Also in views and the encoder; a resumed run asks nobody, and the same command with resume= works."""
    folder = tmp_path / "run"
    run([*REQUEST, "engine=local", f"output_dir={folder}"])
    expected = pooled()
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    for part in ("dataset", "augmentation"):
        np.testing.assert_allclose([saved[part]["mean"], saved[part]["std"]], expected, rtol=0, atol=1e-12)
    agrees(load_encoder(folder / "encoder.pt"), expected)
    record = saved["statistics"]["measured"]
    assert (record["clients"], record["asked"], record["images"]) == (4, 4, 60)
    assert record["clients_by_dtype"] == {"uint8": 4}
    assert (record["lowest"], record["highest"]) == ([0.0], [1.0])
    assert record["percentile_1"] <= record["percentile_50"] <= record["percentile_99"]
    command = read_summary(folder)["command"]
    assert f"'dataset.mean={saved['dataset']['mean']}'" in command
    resumed = load_settings([f"resume={folder}", "dataset.mean=federated", "rounds=2"])
    agrees(resumed.data, expected)
    assert resumed.statistics.measured == record
    assert not resumed.statistics.are_missing
    with pytest.raises(InputError, match=r"dataset.std=\[.*\] \(now \[0.1\]\); keep the settings"):
        load_settings([f"resume={folder}", "dataset.std=[0.1]"])
    with pytest.raises(InputError, match=r"statistics.max_clients=1000 \(now 2\); keep the settings"):
        load_settings([f"resume={folder}", "statistics.max_clients=2"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["partition=dirichlet", "partition.alpha=0.1", "num_clients=9"],  # some clients have few images or none
        ["secure_aggregation=secagg_plus", *UNIFORM],
        ["unseen_clients=1", "calibration=auxiliary", "clients_per_round=3"],
    ],
)
def test_statistics_are_those_of_the_images_of_clients_that_train(overrides):
    asked = []
    settings = measured(*overrides, asked=asked)
    components = build_components(compose([*SMALL, *overrides]), simulated_clients(settings.num_clients))
    untrained = components.federation.untrained_clients
    parts = [part for client, part in enumerate(components.client_data.parts) if client not in untrained]
    rows = torch.from_numpy(np.concatenate(parts))
    values = components.client_data.image_data.images[rows].numpy() / 255
    agrees(settings.data, (values.mean(axis=(0, 2, 3)), values.std(axis=(0, 2, 3))))
    assert settings.statistics.measured["images"] == len(rows)
    assert untrained.isdisjoint(asked)


def test_a_sample_of_the_clients_is_asked():
    """The numbers are of its images; runs with other seeds, and so other numbers, are still one group."""
    asked = []
    settings = measured("num_clients=20", "statistics.max_clients=3", "clients_per_round=2", asked=asked)
    assert len(asked) == settings.statistics.measured["asked"] == 3
    assert settings.statistics.measured["images"] == 9
    assert measured("num_clients=20", "statistics.max_clients=3", "seed=1").data.mean != settings.data.mean


def test_runs_that_differ_in_seed_and_numbers_are_one_group(tmp_path):
    """One with another number of clients is not of the group."""
    found = []
    for number, (clients, seed) in enumerate([(2, 0), (2, 1), (1, 0)]):
        folder = tmp_path / str(number)
        run([*REQUEST, f"statistics.max_clients={clients}", f"seed={seed}", "engine=local", f"output_dir={folder}"])
        found.append(read_run(folder))
    assert found[0].value("dataset.mean") != found[1].value("dataset.mean")
    assert [len(group.runs) for group in group_by_seed(found)] == [2, 1]
    assert len(sweep_results([run.folder for run in found]).rows) == 2
    assert found[0].overrides["dataset.mean"] == "federated"


def test_offline_clients_are_not_asked(caplog):
    """Online for half of the day, and of those that are asked a tenth of the replies is lost."""
    overrides = ["measure_resources=true", "client_speed=lognormal"]
    overrides += ["availability=diurnal", "availability.fraction=0.5"]
    asked = []
    with caplog.at_level(logging.INFO, logger="fedssl"):
        settings = measured("num_clients=20", "clients_per_round=2", *overrides, asked=asked)
    assert 5 < len(asked) < 15
    assert f"images of {len(asked)} of 20 clients, {len(asked)} of which were asked" in caplog.text
    assert settings.statistics.measured["clients"] == len(asked)


def test_differential_privacy_weights_clients_equally_and_adds_noise():
    """Add noise with the standard deviation z sqrt(3) / 2 / 40 = 0.0022, for z = 0.1, 1 channel and 40 clients.

    The number of clients has noise of 2 z sqrt(3) / 2 = 0.17, which is 0.4% of them. Both cost as much as a round.
    """
    overrides = ["num_clients=40", "clients_per_round=4", "dataset.limit=100", *PRIVATE, "privacy.noise_multiplier=0.1"]
    settings = measured(*overrides)
    assert settings.statistics.measured == {
        "clients": 40,
        "asked": 40,
        "noise": pytest.approx(0.1 * 3**0.5 / 2 / 40, rel=0.02),
    }
    components = build_components(compose([*SMALL, *overrides]), simulated_clients(40))
    images = components.client_data.image_data.images
    means = [images[torch.from_numpy(part)].numpy() / 255 for part in components.client_data.parts]
    first = np.mean([values.mean() for values in means])
    second = np.mean([(values**2).mean() for values in means])
    noise = settings.statistics.measured["noise"]
    assert 0 < abs(settings.data.mean[0] - first) < 4 * noise
    assert 0 < abs(settings.data.std[0] ** 2 + settings.data.mean[0] ** 2 - second) < 4 * noise
    for each, releases in ((settings, 4), (compose([*SMALL, *overrides]), 3)):
        mods = build_components(each, simulated_clients(40)).federation.mods
        mod = next(mod for mod in mods if isinstance(mod, Privacy))
        assert mod.privacy_spent(3)["epsilon"] == epsilon(releases, 0.1, settings.privacy.delta)


def test_noise_that_hides_the_variance_is_refused():
    """Compute 0.26 as sqrt(3) / 2 / 3.3: the number of clients, 4, has noise."""
    with pytest.raises(InputError, match=r"standard deviation of 0.26 in the means of 4 clients, which hides their"):
        measured(*PRIVATE, "privacy.noise_multiplier=1")


def _more(client, content, *, place, number):
    if client == 1:
        layer = layer_of(content).copy()
        layer[place] += number
        set_layer(content, layer)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda client, content: _more(client, content, place=0, number=5), "another number of pixels"),
        (lambda client, content: _more(client, content, place=-1, number=5), "contradict its histograms"),
        (lambda client, content: _more(client, content, place=1, number=2**22), "no counts"),
        (lambda client, content: client == 1 and set_layer(content, np.zeros(3, np.float32)), "sent 3 numbers"),
        (lambda client, content: client == 1 and content.clear(), "'metrics'"),
    ],
)
def test_a_client_with_impossible_sums_is_left_out(change, reason, caplog):
    settings = measured(change=change)
    assert (settings.statistics.measured["clients"], settings.statistics.measured["asked"]) == (3, 4)
    assert "1 of 4 clients are not in the statistics: client 1 " in caplog.text
    assert reason in caplog.text
    agrees(settings.data, pooled(), atol=0.05)


def test_secure_aggregation_reports_an_impossible_total(monkeypatch):
    """Here every client claims five images more than its histograms have."""

    def lie(*args, **options):
        plan, update = answer(*args, **options)
        update.layers[LAYER][0] += 5
        return plan, update

    monkeypatch.setattr(handlers, "answer", lie)
    with pytest.raises(RunError, match="a client sent histograms .*, and secure aggregation hides which one"):
        measured("secure_aggregation=secagg_plus", *UNIFORM)


def test_too_many_images_and_no_answers(caplog):
    with pytest.raises(RunError, match=r"no client sent statistics of images; set dataset.mean and dataset.std"):
        measured("aggregation.max_examples=14")
    assert "client 0 reports 15 images but aggregation.max_examples=14" in caplog.text


def test_clients_with_another_dtype_are_named(caplog):
    """8-bit and 16-bit values in one mean: their bits are scaled, but may not mean the same."""

    def change(client, content):
        if client == 2:
            layer = layer_of(content).copy()
            layer[1], layer[2] = layer[2], layer[1]  # the counts of uint8 and uint16
            set_layer(content, layer)

    assert DTYPES[:2] == ("uint8", "uint16")
    settings = measured(change=change)
    assert settings.statistics.measured["clients_by_dtype"] == {"uint8": 3, "uint16": 1}
    assert "3 clients have uint8 images and 1 have others (client 2 uint16)" in caplog.text


def test_a_constant_channel_is_not_scaled(tmp_path, caplog):
    """As by scikit-learn's StandardScaler; blank channels fill images up to a fixed number."""
    images = np.random.default_rng(0).integers(256, size=(12, 8, 8, 3), dtype=np.uint8)
    images[..., 1] = 7
    archive = tmp_path / "images.npz"
    np.savez(archive, train_images=images)
    overrides = ["dataset=medmnist", f"dataset.path={archive}", "dataset.label=null", "dataset.size=8"]
    settings = measured(*overrides, "dataset.splits.train=null", "dataset.splits.test=null")
    assert settings.data.std[1] == 1.0
    assert settings.data.mean[1] == 7 / 255
    assert "channel [1], whose standard deviation is set to 1" in caplog.text


def test_settings_that_are_refused():
    message = r"dataset.mean=federated measures .* but dataset.std is set to \[0.3\]; leave"
    with pytest.raises(InputError, match=message):
        compose([*REQUEST, "dataset.std=[0.3]"])
    with pytest.raises(InputError, match="dataset.mean=mean must be a list of numbers"):
        compose([*SMALL, "dataset.mean=mean"])
    for words in (["dataset.std=federated"], ["dataset.mean=federated", "dataset.std=federated"]):
        assert compose([*SMALL, *words]).statistics.are_missing
    assert not compose(SMALL).statistics.are_missing


def devices(tmp_path, sizes, **others):
    return [
        context(
            data_path=write_images(tmp_path / "images" / name, number, seed=number),
            state_path=tmp_path / "states",
            client_name=name,
            **(others if name == "c" else {}),
        )
        for name, number in zip("abc", sizes, strict=True)
    ]


def test_devices_send_statistics_before_the_first_round(tmp_path):
    """One of them takes part in secure aggregation only, and refuses; what leaves a device is in its history."""
    form = ["dataset=folder", "dataset.size=8", "dataset.channels=1", "dataset.mean=federated", "device=cpu"]
    words = [*form, "num_clients=3", "rounds=1", "local_epochs=1", "encoder.width=4", "threads=1", "batch_size=8"]
    words += ["evaluation=none", "final_evaluation=none", "collapse_images=0", f"output_dir={tmp_path / 'run'}"]
    grid = Devices(*devices(tmp_path, (9, 10, 11), secure_aggregation_only=True))
    run_server_app(grid, words)
    data = load_settings([f"resume={tmp_path / 'run'}"]).data
    files = sorted((tmp_path / "images").glob("[ab]/*.png"))
    values = np.stack([np.asarray(Image.open(file)) for file in files]) / 255
    agrees(data, ([values.mean()], [values.std()]))
    log = (tmp_path / "run" / "run.log").read_text()
    assert "1 of 3 clients are not in the statistics: client 2 failed: this device takes part in secure aggreg" in log
    assert "statistics of the images of 2 of 3 clients, 3 of which were asked: dataset.mean=[0.4" in log
    events = [line["event"] for line in read_history(tmp_path / "states")]
    assert events.count("statistics sent") == 2


@pytest.mark.heavy
def test_local_and_ray_have_the_same_statistics(tmp_path):
    numbers = []
    for engine in ("local", "ray"):
        run([*REQUEST, f"engine={engine}", f"output_dir={tmp_path / engine}"])
        data = load_settings([f"resume={tmp_path / engine}"]).data
        numbers.append((data.mean, data.std))
    assert numbers[0] == numbers[1]
