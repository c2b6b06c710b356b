"""A device within a memory cgroup: 1 GB is enough for conv_small at 64 px; with too little, the round does without."""

import json

import pytest

from tests.devices import write_images
from tests.fleet import fleet
from tests.memory_cgroup import NoMemoryCgroup, memory_cgroup

pytestmark = pytest.mark.heavy

MB = 10**6
RUN = ["encoder=conv_small", "dataset=image_folder", "dataset.size=64", "device=cpu", "threads=1", "local_epochs=1"]
RUN += ["evaluation=none", "final_evaluation=none", "collapse_images=0", "measure_resources=false", "num_clients=2"]
RUN += ["rounds=1", "aggregation.min_updates=1"]


def run_within(limit, folder):
    """Run a round of a device within a limit in bytes and another without; return the reasons for which a
    device did not take part, the number of killed processes, and the peak."""
    with memory_cgroup(limit) as group, fleet("small", "other") as running:
        for name, number in (("small", 64), ("other", 4)):
            images = write_images(folder / "images" / name, number, size=64)
            prefix = group.command(["taskset", "-c", "0"]) if name == "small" else ()
            running.start_node(name, prefix=prefix, client_name=name, data_path=images, state_path=folder / name)
        running.wait_for_nodes(2)
        status, output = running.run(*RUN, f"output_dir={folder / 'run'}")
        kills, peak = group.oom_kills(), group.peak()
    assert status == 0, output
    [metrics] = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rejected = json.loads((folder / "run" / "fleet.json").read_text())["rejected"]
    return [*json.loads(metrics)["dropped"].values(), *rejected.values()], kills, peak


@pytest.mark.parametrize(("limit", "fits"), [(1000 * MB, True), (600 * MB, False)])
def test_a_device_with_little_memory(limit, fits, tmp_path):
    try:
        reasons, kills, peak = run_within(limit, tmp_path)
    except NoMemoryCgroup as reason:
        pytest.skip(str(reason))
    assert 0 < peak <= limit
    if fits:
        assert kills == 0
        assert reasons == []
    else:
        assert kills > 0
        (reason,) = reasons
        assert "for lack of memory" in reason
