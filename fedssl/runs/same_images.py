"""Names of the images of runs, which are equal for the same images at several paths.

A run's folder has number, size and a digest of its image files, of parts of their content alone. Runs that differ in
the path alone distinguish other images: their results are equal only for the same images.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

from fedssl.config.load import IMAGES_FILE
from fedssl.errors import InputError
from fedssl.runs.run import Run
from fedssl.safe_io import read_text

IMAGES_KEY = "dataset.path"


def images_by_run(runs: Sequence[Run], others_of: Callable[[Run], Hashable]) -> dict[Path, str]:
    """Return by folder the first path of the same images, with their description if other images had this path.

    Runs without images on a disk are left out. ``others_of`` returns all else that decides the results of a run.
    A run without a description, because it is old or failed, has the images that others found at its path.
    """
    paths = {run.folder: path for run in runs if (path := run.value(IMAGES_KEY)) not in ("", "null")}
    contents = {folder: found for folder in paths if (found := _description(folder))}
    at_path, with_content = defaultdict[str, set[str]](set), defaultdict[str, list[Run]](list)
    for run in runs:
        if run.folder in contents:
            at_path[paths[run.folder]].add(contents[run.folder])
            with_content[contents[run.folder]].append(run)
    first = {}
    for content, same in with_content.items():
        several = len({paths[run.folder] for run in same}) > 1
        first[content] = None if several and _differ(same, paths, others_of) else paths[same[0].folder]
    names = {}
    for folder, path in paths.items():
        known = at_path[path]
        content = contents.get(folder, next(iter(known)) if len(known) == 1 else "")
        names[folder] = content, (first.get(content) or path)
    used = defaultdict[str, set[str]](set)
    for content, path in names.values():
        used[path].add(content)
    return {
        folder: f"{path} ({content})" if content and len(used[path]) > 1 else path
        for folder, (content, path) in names.items()
    }


def _description(folder: Path) -> str:
    try:
        return (read_text(folder / IMAGES_FILE) or "").strip()
    except InputError:  # of another program
        return ""


def _differ(runs: Sequence[Run], paths: Mapping[Path, str], others_of: Callable[[Run], Hashable]) -> bool:
    """Return whether two finished runs that differ in the path alone have other results."""
    alike = defaultdict[Hashable, list[Run]](list)
    for run in runs:
        if run.finished:
            alike[run.seed, others_of(run)].append(run)
    return any(
        paths[run.folder] != paths[same[0].folder] and run.results != same[0].results
        for same in alike.values()
        for run in same[1:]
    )
