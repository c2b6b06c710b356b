"""Linear features of one client and of all clients: Theorem 3.2 and Proposition 4.1 of Dec-SSL, in numbers.

    python examples/theory.py [--sources 2] [--dims 64 128 256 512 1024] [--seeds 5] [--folder .]

Prints a table, and writes theory.csv and theory.png. Dec-SSL is Wang et al., ICLR 2023, arXiv 2210.10947.

**Data.** In section 3.2, source k of K has mostly images of classes 2k - 1 and 2k, as in Liu et al., 2021 (arXiv
2110.05025). The exact distribution is in an appendix that was not available. We use, in d dimensions with the basis
e_1, ..., e_d, for images of class 2k - 1 (+) and 2k (-)

    x = +-e_k + d^(1/5) sum_{j != k, j <= K} q_j e_j + d^(-1/5) xi,    q_j = 0 or 1 by a fair coin, xi ~ N(0, I)

The signal of other classes is large and irrelevant for the source. Noise is small in each direction and large in sum. A
source has 2d images of its two classes, and two images of each other class.

**Self-supervised features** minimize Eq. 3.1. Its augmentations cancel in the expectation, which leaves
-tr(w S w') + 1/2 ||w' w||_F^2 with S = E[x x']. So w' w is the best rank-m approximation of S (Eckart and Young), and
the rows of w span the first m = 2K eigenvectors of S. The global objective, Eq. 2.2, uses the mean of S over sources.

**Supervised features** minimize ||u' u||_F^2 + ||v' v||_F^2 under margins of 1 (section 4.2). For a product v u = M
that is at least 2 ||M||_F^2, with equality for u = s^(1/2) V' where M = U s V'. So M is the multi-class support vector
machine with hard margins, which is convex, and u' u = (M' M)^(1/2).

**Results.** Representability r_i is the squared length of e_i projected on the span of the features (Definition 3.1).
For self-supervised features 1 - r_i = O(d^(-4/5)): for one source for all i <= K but its own, for all sources for all
i <= K. The correlation sum_j <u_j, e_i>^2 of supervised features is at least about 1 for the source's own direction and
near 0 for the others.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from fedssl.atomic_files import write_text
from fedssl.errors import InputError
from fedssl.plots.style import new_figure, write_png
from fedssl.seeding import numpy_generator
from fedssl.text_table import align, to_csv

RARE = 2  # images of each class of other sources
HARD = 1e3  # penalty of the margins, large enough for hard margins
KINDS = ("local SSL", "global SSL", "local SL")


@dataclass(frozen=True)
class Finding:
    """Measurements of one kind of features in one draw of the data."""

    dim: int
    seed: int
    kind: str  # one of `KINDS`; local features are of the first source
    representability: np.ndarray  # (sources,), of e_1, ..., e_K
    correlation: np.ndarray  # (sources,), NaN for self-supervised features


def draw_source(
    source: int, *, sources: int, dim: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw images ``(n, dim)`` of a source, counted from 0, and their classes ``(n,)`` from 0 to 2K - 1."""
    counts = [dim if label // 2 == source else RARE for label in range(2 * sources)]
    labels = np.repeat(np.arange(2 * sources), counts)
    images = dim**-0.2 * generator.standard_normal((len(labels), dim))
    signal = dim**0.2 * generator.integers(2, size=(len(labels), sources))
    signal[np.arange(len(labels)), labels // 2] = 1 - 2 * (labels % 2)
    images[:, :sources] += signal
    return images, labels


def self_supervised(sources: Sequence[np.ndarray], *, width: int) -> np.ndarray:
    """Return features ``(width, dim)`` that minimize Eq. 3.1, averaged over the sources."""
    moment = np.mean([images.T @ images / len(images) for images in sources], axis=0)
    values, vectors = np.linalg.eigh(moment)
    features: np.ndarray = (vectors[:, -width:] * np.sqrt(values[-width:])).T
    return features


def supervised(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return features ``(rank, dim)`` of the smallest two-layer linear network with margins of 1 for all images."""
    from sklearn.svm import LinearSVC

    solver = LinearSVC(multi_class="crammer_singer", C=HARD, fit_intercept=False, tol=1e-6, max_iter=10**5)
    product = solver.set_params(random_state=0).fit(images, labels).coef_
    outputs = images @ product.T
    own = np.take_along_axis(outputs, labels[:, None], axis=1)[:, 0]
    np.put_along_axis(outputs, labels[:, None], -np.inf, axis=1)
    if (own - outputs.max(axis=1)).min() < 1 - 1e-3:
        raise InputError(f"the classes of {len(labels)} images in {images.shape[1]} dimensions overlap; raise --dims")
    _, scales, directions = np.linalg.svd(product, full_matrices=False)
    kept = scales > 1e-6 * scales[0]
    features: np.ndarray = np.sqrt(scales[kept])[:, None] * directions[kept]
    return features


def representability(features: np.ndarray) -> np.ndarray:
    """Return the representability ``(dim,)`` of each basis direction, from 0 to 1 (Definition 3.1)."""
    _, scales, basis = np.linalg.svd(features, full_matrices=False)
    projected: np.ndarray = np.square(basis[scales > 1e-10 * scales[0]]).sum(axis=0)
    return projected


def measure(*, sources: int, dim: int, seed: int) -> list[Finding]:
    """Measure all kinds of features in one draw of the data."""
    generator = numpy_generator(seed, "theory", sources, dim)
    drawn = [draw_source(source, sources=sources, dim=dim, generator=generator) for source in range(sources)]
    with threadpool_limits(limits=1):
        features = {
            "local SSL": self_supervised([drawn[0][0]], width=2 * sources),
            "global SSL": self_supervised([images for images, _ in drawn], width=2 * sources),
            "local SL": supervised(*drawn[0]),
        }
    missing = np.full(sources, np.nan)
    return [
        Finding(
            dim,
            seed,
            kind,
            representability(features[kind])[:sources],
            np.square(features[kind]).sum(axis=0)[:sources] if kind == "local SL" else missing,
        )
        for kind in KINDS
    ]


def mean_of(findings: Sequence[Finding], kind: str, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return representability and correlation of one kind and dimension, averaged over seeds, each ``(sources,)``."""
    chosen = [(each.representability, each.correlation) for each in findings if (each.kind, each.dim) == (kind, dim)]
    representability, correlation = np.mean(chosen, axis=0)
    return representability, correlation


def constant(findings: Sequence[Finding]) -> float:
    """Return the smallest c for which Theorem 3.2 holds: each of its r_i is at least 1 - c d^(-4/5)."""
    directions = {"local SSL": slice(1, None), "global SSL": slice(None)}
    return max(
        float((1 - each.representability[directions[each.kind]]).max() * each.dim**0.8)
        for each in findings
        if each.kind in directions
    )


def table(findings: Sequence[Finding], dims: Sequence[int]) -> str:
    """Return a table of means over seeds: the direction of the source's own classes, and the mean of the others."""
    bound = constant(findings)
    lines = [["d", "bound", *(f"{kind}: {of}" for kind in KINDS for of in ("own", "others")), "corr.: own", "others"]]
    for dim in dims:
        cells = [f"{1 - bound * dim**-0.8:.3f}"]
        for kind in KINDS:
            values, correlation = mean_of(findings, kind, dim)
            cells += [f"{values[0]:.3f}", f"{values[1:].mean():.3f}"]
        lines.append([str(dim), *cells, f"{correlation[0]:.3f}", f"{correlation[1:].mean():.3f}"])
    return align(lines, left=0)


def draw(file: Path, findings: Sequence[Finding], dims: Sequence[int]) -> None:
    """Plot r_i of the first directions in the largest dimension, and 1 - r_i against the dimension."""
    figure = new_figure(width=11, height=4)
    left, right = figure.subplots(1, 2)
    bound, largest = constant(findings), max(dims)
    for number, kind in enumerate(KINDS):
        values = mean_of(findings, kind, largest)[0]
        left.bar(np.arange(len(values)) + 0.27 * (number - 1), values, width=0.25, label=kind)
        local = (("own", slice(0, 1), "--"), ("others", slice(1, None), "-"))
        for of, part, line in (("all", slice(None), "-"),) if kind == "global SSL" else local:
            missing = [1 - mean_of(findings, kind, dim)[0][part].mean() for dim in dims]
            right.plot(dims, missing, line, color=f"C{number}", marker="o", markersize=4, label=f"{kind}, {of}")
    level = f"1 - c d^(-4/5), c = {bound:.2f}"
    left.axhline(1 - bound * largest**-0.8, color="black", linestyle=":", label=level)
    right.plot(dims, bound * np.asarray(dims) ** -0.8, ":", color="black", label="c d^(-4/5)")
    names = ["e_1 (own)", *(f"e_{number + 1}" for number in range(1, len(values)))]
    left.set(xticks=range(len(names)), xticklabels=names, ylim=(0, 1.35), ylabel="representability r_i")
    left.set_title(f"of source 1 and of all sources, d = {largest}")
    right.set(xscale="log", yscale="log", xlabel="dimension d", ylabel="1 - r_i", title="not represented")
    right.set_xticks(list(dims), [str(dim) for dim in dims])
    right.yaxis.set_major_formatter("{x:g}")  # no powers of ten
    for axis in (right.xaxis, right.yaxis):
        axis.set_minor_formatter("")
    left.legend(frameon=False, ncols=2, fontsize=8)
    figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    write_png(figure, file)


def rows(findings: Sequence[Finding], sources: int) -> list[list[object]]:
    """Return the rows of theory.csv, one for each kind of features, draw and direction."""
    header: list[object] = ["sources", "dim", "seed", "features", "direction", "representability", "correlation"]
    return [header] + [
        [sources, each.dim, each.seed, each.kind, i + 1, each.representability[i], None if np.isnan(value) else value]
        for each in findings
        for i, value in enumerate(each.correlation)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(description="Theorem 3.2 and Proposition 4.1 of Dec-SSL, in numbers.")
    parser.add_argument("--sources", type=int, default=2, help="K, at least 2")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="d, each at least 16 K")
    parser.add_argument("--seeds", type=int, default=5, help="draws of the data")
    parser.add_argument("--folder", type=Path, default=Path(), help="for theory.csv and theory.png")
    options = parser.parse_args(arguments)
    dims, sources, seeds, folder = sorted(set(options.dims)), options.sources, options.seeds, options.folder.resolve()
    try:
        if sources < 2 or dims[0] < 16 * sources or seeds < 1 or not folder.is_dir():
            raise InputError(
                f"--sources {sources} must be at least 2, --dims {dims} at least {16 * sources} each, "
                f"--seeds {seeds} at least 1, and --folder {folder} must exist"
            )
        draws = [measure(sources=sources, dim=dim, seed=seed) for dim in dims for seed in range(seeds)]
        findings = [finding for kinds in draws for finding in kinds]
        print(table(findings, dims))
        print(f"bound: 1 - c d^(-4/5) with c = {constant(findings):.2f}, the smallest that holds in every draw")
        write_text(folder / "theory.csv", to_csv(rows(findings, sources)))
        draw(folder / "theory.png", findings, dims)
    except InputError as error:
        print(f"theory: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
