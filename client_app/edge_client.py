"""An edge client: its node configuration, and its settings for a server's task.

The keys of the SuperNode's ``--node-config`` are those of `NODE_CONFIG_KEYS`, which docs/devices.md explains.
No message changes any of them.
"""

import glob
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from client_app.limit_checks import check_settings
from client_app.state_store import FILE_STORE, StateStore
from fedssl.atomic_files import remove_partial_files, write_text
from fedssl.base_layers import stored_digests
from fedssl.config.component import Component
from fedssl.config.device_task import compose_task, read_task
from fedssl.config.literal import user_path
from fedssl.config.saved_run import BASE_FOLDER
from fedssl.config.settings import ClientSettings
from fedssl.config.targets import search_folders, searchpath_override
from fedssl.datasets.path_index import ALL_IMAGES, bytes_per_value, files_digest, index_all
from fedssl.datasets.raster import WIDEST
from fedssl.datasets.sources import ALLOWED, NoImagesError
from fedssl.errors import InputError, RequestRefused
from fedssl.fleet.checks import free_space
from fedssl.fleet.encoders import FOLDER as ENCODERS_FOLDER
from fedssl.fleet.limits import Limits, read_limits
from fedssl.logs import log
from fedssl.machine.devices import select_device
from fedssl.machine.process import default_threads
from fedssl.safe_io import read_text, sanitize_line
from fedssl.wire.device import check_device_name, installed_versions
from fedssl.wire.identity import NodeInfo

NODE_CONFIG_KEYS = (
    "data-path",
    "client-name",
    "state-path",
    "limits",
    "base-path",
    "max-rank",
    "authority",
    "config-dir",
    "threads",
    "device",
    "partition-id",
    "secure-aggregation-only",
)
IGNORED_KEYS = ("num-partitions",)  # set by Flower's templates for simulations

Value = bool | float | int | str


@dataclass(frozen=True, kw_only=True)
class EdgeClient:
    """An edge client by its configuration.

    ``folders`` are folders of settings beside ``conf/``. ``threads`` None depends on the image size.
    """

    data_path: Path
    states: Path
    name: str
    partition: int | None = None
    folders: tuple[Path, ...] = ()
    threads: int | None = None
    torch_device: str = "auto"
    only_sums: bool = False
    limits: Limits = field(default_factory=Limits)
    authority: Path | None = None
    base_path: Path | None = None
    max_rank: int | None = None
    store: ClassVar[StateStore] = FILE_STORE  # the state is on the disk before the reply is sent

    @classmethod
    def read(cls, node_config: Mapping[str, Value]) -> "EdgeClient":
        """Return the client of a node's configuration; raises `InputError`."""
        unknown = sorted(node_config.keys() - {*NODE_CONFIG_KEYS, *IGNORED_KEYS})
        if unknown:
            raise InputError(
                f"the node's configuration has {unknown[0]}; known are {', '.join(NODE_CONFIG_KEYS)}; remove it, or "
                "upgrade the server if a newer version wrote it"
            )
        if not node_config.get("data-path"):
            raise InputError(
                "this SuperNode has no folder of images; start it with --node-config 'data-path=\"FOLDER\"'"
            )
        partition = _number(node_config, "partition-id", minimum=0)
        name = str(node_config.get("client-name", "")) or _default_name(partition)
        check_device_name(name)
        device = str(node_config.get("device", "auto"))
        select_device(device)  # rejects a device that torch does not have
        limits, folder = node_config.get("limits"), node_config.get("config-dir")
        states, authority = node_config.get("state-path"), node_config.get("authority")
        base_path = node_config.get("base-path")
        data_home = Path(os.environ.get("XDG_DATA_HOME") or user_path("~/.local/share"))
        return cls(
            data_path=_path(node_config["data-path"]),
            states=_path(states) if states else data_home / "fedssl",
            name=name,
            partition=partition,
            folders=tuple(search_folders([searchpath_override([_path(folder)])])) if folder else (),
            threads=_number(node_config, "threads", minimum=1),
            torch_device=device,
            only_sums=_flag(node_config, "secure-aggregation-only"),
            limits=read_limits(_path(limits)) if limits else Limits(),
            authority=_path(authority) if authority else None,
            base_path=_path(base_path) if base_path else None,
            max_rank=_number(node_config, "max-rank", minimum=1),
        )

    @property
    def number(self) -> int:
        """Return its number in seeds. A name gives a number that no partition has."""
        named = int.from_bytes(f"device {self.name}".encode(), "little")
        return named if self.partition is None else self.partition

    def state_folder(self, states: Path) -> Path:
        return states / self.name

    @property
    def base_folders(self) -> tuple[Path, ...]:
        """Return the folders of base layers: that of all runs, and the owner's."""
        return (self.states / BASE_FOLDER, *((self.base_path,) if self.base_path else ()))

    @property
    def node_info(self) -> NodeInfo:
        num_images, problem = self._count_images()
        if problem:
            log.error("this device %s (data-path=%s)", problem, self.data_path)
        return NodeInfo(
            partition=self.partition,
            name=self.name,
            num_images=None if self.only_sums else num_images,
            free_disk=free_space(self.states) // 10**6,
            versions=installed_versions(),
            base_digests=stored_digests(self.base_folders),
            max_rank=self.max_rank,
            problem=problem,
        )

    def settings(self, text: str) -> ClientSettings:
        """Return the settings for a task; raises `RequestRefused` for a task beyond the limits."""
        settings = self.accept(text)
        _bind_run_to_task(settings.states, text, folders=self.folders)
        for folder in (self.state_folder(settings.states), self.states / BASE_FOLDER, self.states / ENCODERS_FOLDER):
            remove_partial_files(folder, of_running=False)
        self.limits.check_start(self.states)
        return settings

    def accept(self, text: str) -> ClientSettings:
        """Return the settings for a task that is not started; raises `RequestRefused` for one beyond the limits."""
        num_images, problem = self._count_images()
        task = read_task(text, states=self.states, folders=self.folders)
        settings = self._with_local_settings(task, num_images=num_images)
        if problem:
            raise RequestRefused(f"the device {problem}")
        ample = check_settings(settings, self.limits, num_images=num_images)
        return replace(settings, machine=replace(settings.machine, keep_freed_memory=ample))

    def check_rank(self, rank: int | None) -> None:
        """Refuse factors of a larger rank than ``max-rank``; raises `RequestRefused`. None: the plan has no factors."""
        if rank is not None and self.max_rank is not None and rank > self.max_rank:
            raise RequestRefused(
                f"the plan has low-rank factors of rank {rank} but this device allows {self.max_rank} (max-rank); set "
                f"tuning.rank={self.max_rank}, or tuning.aggregation=svd or stack, which aggregate different ranks"
            )

    def images_digest(self) -> str:
        """Return a digest of the device's images, which changes when an image is added, replaced or deleted."""
        return files_digest(self.data_path)

    def num_training_files(self, settings: ClientSettings) -> int:
        """Return the number of files from which a task reads images, also of unreadable ones."""
        files = index_all(self.data_path).count
        return files if settings.data.limit is None else min(files, settings.data.limit)

    def _with_local_settings(self, settings: ClientSettings, *, num_images: int) -> ClientSettings:
        data = settings.data
        threads = min(self.threads or default_threads(data.size), self.limits.threads)
        allowed = self.limits.memory_bytes() // max(num_images * data.channels * data.size**2, 1)  # bytes per value
        is_sampled = 1 <= allowed < WIDEST and num_images > 0
        needed = bytes_per_value(self.data_path, data.reader.values) if is_sampled else 1
        local = {
            "path": str(self.data_path),
            "cache": str(self.states / ".pictures" / self.name),
            "storage": "decoded" if needed <= allowed else "encoded",
        }
        reader = Component({**settings.data.reader.values, **ALL_IMAGES, **local})
        return replace(
            settings,
            machine=replace(settings.machine, device=self.torch_device, threads=threads),
            base_folders=self.base_folders,
            data=replace(settings.data, reader=reader, federated="train", train=None, test=None),
        )

    def _count_images(self) -> tuple[int, str]:
        """Return the number of images, and why there are none, without paths; empty if there are."""
        if not self.data_path.exists() and not glob.has_magic(str(self.data_path)):
            return 0, "has no images: its data-path does not exist"
        try:
            return index_all(self.data_path).count, ""
        except NoImagesError as error:
            remedy = "; ".join(error.remedies)
            return 0, f"has no images in its data-path ({remedy or f'allowed are {ALLOWED}'})"
        except InputError as error:
            log.error("%s", error)
            return 0, "cannot use the images in its data-path; its log has the reason"


def safe_error_message(error: Exception) -> str:
    """Return an error message for the server, without information on the device except its limits.

    A message that may contain a path stays on the device, and so does that of any unexpected error.
    """
    text = str(error)
    if not isinstance(error, RequestRefused) and (not isinstance(error, InputError) or re.search(r"[/\\~]", text)):
        cause = error.__cause__ if isinstance(error, InputError) else error
        reason = f" ({os.strerror(cause.errno)})" if isinstance(cause, OSError) and cause.errno else ""
        text = f"{type(error).__name__}{reason}; see the log of the device"
    return sanitize_line(text)


def _bind_run_to_task(run: Path, text: str, *, folders: Sequence[Path]) -> None:
    """Bind the run's states to its task, so that no other task with the same run name can use them."""
    task = json.loads(text)
    rounds = task["values"].pop("rounds")  # a run may be extended
    new, file = json.dumps(task, sort_keys=True), run / ".task.json"
    before = read_text(file)
    if before is None:
        run.mkdir(parents=True, exist_ok=True)
        write_text(file, new)
    elif before != new and not _is_same_task(before, text, rounds=rounds, folders=folders):
        raise RequestRefused(
            f"run_id={run.name} is another run here, with other settings; settings of a run do not change"
        )


def _is_same_task(before: str, text: str, *, rounds: int, folders: Sequence[Path]) -> bool:
    """Return whether a stored task has the settings of this one.

    A version that stored it may lack settings of this version. They have their defaults.
    """
    try:
        stored = json.loads(before)
        stored["values"]["rounds"] = rounds
        return compose_task(json.dumps(stored), folders) == compose_task(text, folders)
    except (ValueError, KeyError, TypeError):  # damaged, or with settings that this version lacks
        return False


def _path(value: Value) -> Path:
    return user_path(str(value)).absolute()


def _default_name(partition: int | None) -> str:
    """Return the host name without characters that are invalid in a device name."""
    host = re.sub(r"[^A-Za-z0-9_.-]+", "-", platform.node()).lstrip("-.")[:30] or "device"
    return host if partition is None else f"{host}-{partition}"


def _flag(node_config: Mapping[str, Value], key: str) -> bool:
    value = node_config.get(key, False)
    if not isinstance(value, bool):
        raise InputError(f"{key}={value} is not valid; set it to true or false")
    return value


def _number(node_config: Mapping[str, Value], key: str, *, minimum: int) -> int | None:
    value = node_config.get(key)
    if value is None:
        return None
    if type(value) is not int or not minimum <= value < 2**31:
        raise InputError(f"{key}={value} of the node's configuration must be an integer of at least {minimum}")
    return value
