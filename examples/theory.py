"""What linear features learn from one source and from all: Theorem 3.2 and Proposition 4.1 of Dec-SSL, in numbers.

    python examples/theory.py [--sources 2] [--dims 64 128 256 512 1024] [--seeds 5] [--folder .]

prints a table, and writes theory.csv and theory.png. Dec-SSL is Wang et al., ICLR 2023, arXiv 2210.10947.

**Data.** Section 3.2 says that source k of K holds mostly images of classes 2k - 1 and 2k, and follows Liu et al.,
2021 (arXiv 2110.05025). Which images these are stands in an appendix that we have not seen; this is our reading, in d
dimensions with basis e_1, ..., e_d. An image of class 2k - 1 (+) or 2k (-) is

    x = +-e_k + d^(1/5) sum_{j != k, j <= K} q_j e_j + d^(-1/5) xi,    q_j = 0 or 1 by a fair coin, xi ~ N(0, I)

so that what tells other classes apart is large and irrelevant for the source's own, and noise is small in each
direction but large in all together. A source has 2d images of its two classes, and two of each other class.

**Self-supervised features** minimize Eq. 3.1. Its augmentations drop out of the expectation, which leaves
-tr(w S w') + 1/2 ||w' w||_F^2 with S = E[x x']; so w' w is the best approximation of S of rank m (Eckart and Young),
and the rows of w span the first m = 2K eigenvectors of S. The global objective, Eq. 2.2, has the mean of the sources'
S.

**Supervised features** minimize ||u' u||_F^2 + ||v' v||_F^2 under margins of 1 (section 4.2). For a product v u = M
that is at least 2 ||M||_F^2, attained by u = s^(1/2) V' of M = U s V'; so M is the multi-class support vector machine
with hard margins, which is convex, and u' u = (M' M)^(1/2).

**What is shown.** Representability r_i, the squared length of e_i's projection on the features' span (Definition 3.1):
for self-supervised features 1 - r_i = O(d^(-4/5)), of a source for all i <= K but its own, of all sources for all i
<= K. And the correlation sum_j <u_j, e_i>^2 of supervised ones: at least about 1 for the source's own direction, near 0
for the others.
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
from fedssl.report.text_table import align, to_csv
from fedssl.seeding import numpy_generator

RARE = 2  # images of every class that is not the source's own
HARD = 1e3  # price of a missed margin, at which none is missed
KINDS = ("local SSL", "global SSL", "local SL")


@dataclass(frozen=True)
class Finding:
    """What one kind of features has of the first basis directions, in one draw of the data.

    Attributes
    ----------
    dim, seed : int
    kind : str
        One of `KINDS`; local ones are those of the first source.
    representability, correlation : ndarray
        ``(sources,)``, of e_1, ..., e_K; the correlation is NaN for self-supervised features.
    """

    dim: int
    seed: int
    kind: str
    representability: np.ndarray
    correlation: np.ndarray


def draw_source(
    source: int, *, sources: int, dim: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Images ``(n, dim)`` of a source, counted from 0, and their classes ``(n,)`` from 0 to 2K - 1."""
    counts = [dim if label // 2 == source else RARE for label in range(2 * sources)]
    labels = np.repeat(np.arange(2 * sources), counts)
    images = dim**-0.2 * generator.standard_normal((len(labels), dim))
    signal = dim**0.2 * generator.integers(2, size=(len(labels), sources))
    signal[np.arange(len(labels)), labels // 2] = 1 - 2 * (labels % 2)
    images[:, :sources] += signal
    return images, labels


def self_supervised(sources: Sequence[np.ndarray], *, width: int) -> np.ndarray:
    """Features ``(width, dim)`` that minimize Eq. 3.1 for one source, or its mean over several of equal size."""
    moment = np.mean([images.T @ images / len(images) for images in sources], axis=0)
    values, vectors = np.linalg.eigh(moment)
    features: np.ndarray = (vectors[:, -width:] * np.sqrt(values[-width:])).T
    return features


def supervised(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Features ``(rank, dim)`` of the smallest two-layer linear network with margins of 1 for all images.

    Raises
    ------
    InputError
        No linear network has such margins.
    """
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
    """Definition 3.1: for each basis direction ``(dim,)``, what the span of the rows has of it, from 0 to 1."""
    _, scales, basis = np.linalg.svd(features, full_matrices=False)
    projected: np.ndarray = np.square(basis[scales > 1e-10 * scales[0]]).sum(axis=0)
    return projected


def find(*, sources: int, dim: int, seed: int) -> list[Finding]:
    """Measure all kinds of features in one draw of the data."""
    generator = numpy_generator(seed, "theory", sources, dim)
    drawn = [draw_source(source, sources=sources, dim=dim, generator=generator) for source in range(sources)]
    with threadpool_limits(limits=1):
        features = {
            "local SSL": self_supervised([drawn[0][0]], width=2 * sources),
            "global SSL": self_supervised([images for images, _ in drawn], width=2 * sources),
            "local SL": supervised(*drawn[0]),
        }
        return [
            Finding(
                dim,
                seed,
                kind,
                representability(features[kind])[:sources],
                np.square(features[kind]).sum(axis=0)[:sources] if kind == "local SL" else np.full(sources, np.nan),
            )
            for kind in KINDS
        ]


def mean_of(findings: Sequence[Finding], kind: str, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Representability and correlation of one kind in one dimension, the means over seeds, each ``(sources,)``."""
    found = [one for one in findings if (one.kind, one.dim) == (kind, dim)]
    return np.mean([one.representability for one in found], axis=0), np.mean([one.correlation for one in found], axis=0)


def constant(findings: Sequence[Finding]) -> float:
    """The smallest c for which every r_i that Theorem 3.2 speaks of is at least 1 - c d^(-4/5)."""
    spoken_of = {"local SSL": slice(1, None), "global SSL": slice(None)}
    return max(
        float((1 - one.representability[spoken_of[one.kind]]).max() * one.dim**0.8)
        for one in findings
        if one.kind in spoken_of
    )


def table(findings: Sequence[Finding], dims: Sequence[int]) -> str:
    """Means over seeds; "own" is the direction of the source's own classes, "others" the mean of the other ones."""
    bound = constant(findings)
    lines = [["d", "bound", *(f"{kind}: {of}" for kind in KINDS for of in ("own", "others")), "corr.: own", "others"]]
    for dim in dims:
        cells = [f"{1 - bound * dim**-0.8:.3f}"]
        for kind in KINDS:
            found, correlation = mean_of(findings, kind, dim)
            cells += [f"{found[0]:.3f}", f"{found[1:].mean():.3f}"]
        lines.append([str(dim), *cells, f"{correlation[0]:.3f}", f"{correlation[1:].mean():.3f}"])
    return align(lines, left=0)


def draw(file: Path, findings: Sequence[Finding], dims: Sequence[int]) -> None:
    """Draw r_i of the first directions in the largest dimension, and how they change with the dimension."""
    figure = new_figure(width=11, height=4)
    left, right = figure.subplots(1, 2)
    bound, largest = constant(findings), max(dims)
    for number, kind in enumerate(KINDS):
        found = mean_of(findings, kind, largest)[0]
        left.bar(np.arange(len(found)) + 0.27 * (number - 1), found, width=0.25, label=kind)
        of_one = (("own", slice(0, 1), "--"), ("others", slice(1, None), "-"))
        for of, part, line in (("all", slice(None), "-"),) if kind == "global SSL" else of_one:
            missing = [1 - mean_of(findings, kind, dim)[0][part].mean() for dim in dims]
            right.plot(dims, missing, line, color=f"C{number}", marker="o", markersize=4, label=f"{kind}, {of}")
    level = f"1 - c d^(-4/5), c = {bound:.2f}"
    left.axhline(1 - bound * largest**-0.8, color="black", linestyle=":", label=level)
    right.plot(dims, bound * np.asarray(dims) ** -0.8, ":", color="black", label="c d^(-4/5)")
    names = ["e_1 (own)", *(f"e_{number + 1}" for number in range(1, len(found)))]
    left.set(xticks=range(len(names)), xticklabels=names, ylim=(0, 1.35), ylabel="representability r_i")
    left.set_title(f"of source 1 and of all sources, d = {largest}")
    right.set(xscale="log", yscale="log", xlabel="dimension d", ylabel="1 - r_i", title="what is missing")
    right.set_xticks(list(dims), [str(dim) for dim in dims])
    right.yaxis.set_major_formatter("{x:g}")  # powers of ten would be formulas
    for axis in (right.xaxis, right.yaxis):
        axis.set_minor_formatter("")
    left.legend(frameon=False, ncols=2, fontsize=8)
    figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    write_png(figure, file)


def rows(findings: Sequence[Finding], sources: int) -> list[list[object]]:
    """What `theory.csv` holds: a line for every kind of features, draw and direction."""
    header: list[object] = ["sources", "dim", "seed", "features", "direction", "representability", "correlation"]
    return [header] + [
        [sources, one.dim, one.seed, one.kind, at + 1, one.representability[at], None if np.isnan(about) else about]
        for one in findings
        for at, about in enumerate(one.correlation)
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Theorem 3.2 and Proposition 4.1 of Dec-SSL, in numbers.")
    parser.add_argument("--sources", type=int, default=2, help="K, at least 2")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="d, each at least 16 K")
    parser.add_argument("--seeds", type=int, default=5, help="draws of the data")
    parser.add_argument("--folder", type=Path, default=Path(), help="for theory.csv and theory.png")
    said = parser.parse_args(words)
    try:
        if said.sources < 2 or min(said.dims) < 16 * said.sources or said.seeds < 1 or not said.folder.is_dir():
            raise InputError(
                f"--sources {said.sources} must be at least 2, --dims {said.dims} at least {16 * said.sources} each, "
                f"--seeds {said.seeds} at least 1, and --folder {said.folder} must be there"
            )
        dims, folder = sorted(set(said.dims)), said.folder.resolve()
        findings = [
            one for dim in dims for seed in range(said.seeds) for one in find(sources=said.sources, dim=dim, seed=seed)
        ]
        print(table(findings, dims))
        print(f"bound: 1 - c d^(-4/5) with c = {constant(findings):.2f}, the smallest that holds in every draw")
        write_text(folder / "theory.csv", to_csv(rows(findings, said.sources)))
        draw(folder / "theory.png", findings, dims)
    except InputError as error:
        print(f"theory: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
