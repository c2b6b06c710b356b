"""Modules that read the bytes of others, and the tests that plant a marker in these."""

import re
from pathlib import Path

from tests import test_planted

ROOT = Path(__file__).parents[1]

# Functions that turn the bytes of others into values, and the modules that call them. A new module needs a row in a
# test of `test_planted` if its values can be settings; `fedssl.plain_values` is for these.
CALLS = r"\b(json\.loads?|yaml\.\w*load|read_yaml|load_plain_yaml|read_tensors|read_tensor_file|read_arrays"
CALLS += r"|torch\.load|np\.load|tomllib\.loads|pickle\.loads|OmegaConf\.load|OmegaConf\.create|from_dotlist"
CALLS += r"|safe_open|load_file|joblib\.load)\("
MODULES = {
    # settings, which these pass through `plain_values`
    "fedssl/config/device_task.py": "test_a_task_for_a_device",
    "fedssl/config/load.py": "test_the_settings_of_a_simulated_client",
    "fedssl/config/saved_run.py": "test_config_yaml",
    "fedssl/evaluation/cli.py": "test_config_yaml",
    "fedssl/export/encoder_file.py": "test_an_encoder_file",
    "fedssl/export/weights.py": "test_an_encoder_file",
    "fedssl/runs/run.py": "test_files_of_a_run",
    "simulation/sweep_state.py": "test_sweep_yaml",
    # the user's own settings, and conf/
    "fedssl/config/compose.py": "",
    "fedssl/config/overrides.py": "",
    "fedssl/evaluation/transfer.py": "",
    # numbers, names and arrays, which no configuration library gets
    "client_app/edge_client.py": "test_a_task_for_a_device",
    "client_app/resident_client.py": "",  # from its own parent process
    "client_app/state_store.py": "",
    "fedssl/__init__.py": "",  # its version
    "fedssl/base_layers.py": "",
    "fedssl/datasets/": "",
    "fedssl/embedding/onnx_backend.py": "",  # numbers of the metadata of a graph
    "fedssl/embedding/partial.py": "",  # its own note
    "fedssl/explore/embeddings_file.py": "",
    "fedssl/fleet/": "test_text_files",
    "fedssl/export/peft_adapter.py": "test_metadata_of_safetensors_files",
    "fedssl/export/huggingface.py": "",
    "fedssl/methods/teacher.py": "",
    "fedssl/partition/feature_clustering.py": "",
    "fedssl/pretrained/checkpoints.py": "test_pickles",
    "fedssl/pretrained/sources.py": "",
    "fedssl/report/paper_table.py": "",
    "fedssl/runs/jsonl.py": "test_files_of_a_run",
    "fedssl/runs/manifest.py": "",
    "fedssl/runs/representations.py": "test_pickles",
    "fedssl/runs/run_report.py": "",
    "fedssl/runs/snapshots.py": "test_pickles",
    "fedssl/safe_io.py": "test_pickles",
    "fedssl/tensor_file.py": "test_pickles",
    "fedssl/watch/live_run.py": "",  # numbers and texts of a page
    "fedssl/wire/device.py": "",
    "fedssl/wire/wire_format.py": "",
    "server_app/checkpoint.py": "test_pickles",
    "server_app/client_models.py": "test_pickles",
    "server_app/fleet_file.py": "",
    "server_app/grid_internals.py": "",
    "server_app/round_aggregation.py": "",  # metrics of the run's own strategy
    "server_app/serialization.py": "",
    "strategies/flower/task.py": "",  # fields of a dataclass, of the server that sends the model
}


def test_every_reader_is_known():
    packages = ("fedssl", "strategies", "client_app", "server_app", "simulation")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    found = [str(file.relative_to(ROOT)) for file in files if re.search(CALLS, file.read_text())]
    assert [file for file in found if not file.startswith(tuple(MODULES))] == []
    assert {name for name in MODULES.values() if name} <= vars(test_planted).keys()
    unsafe = r"weights_only=False|allow_pickle=True|yaml\.(unsafe_|full_)?load\((?!text, Loader=_PlainLoader)"
    assert [str(file) for file in files if re.search(unsafe, file.read_text())] == []
