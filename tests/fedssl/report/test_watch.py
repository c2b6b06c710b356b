"""A sweep that is followed, with locks held by this process and no time spent."""

from pathlib import Path

from tests.fedssl.report.test_html_page import job
from tests.fedssl.runs.test_run import locked

EVERY = 7.0


def test_a_sweep_is_followed_to_its_end(tmp_path: Path, monkeypatch, command):
    """First a run goes on; then it has ended, and the sweep goes on without any; then its last job ends with it."""
    folder = job(tmp_path / "sweep" / "0", "strategy=fedavg", knn=0.5)
    summary = (folder / "summary.json").read_text()
    (folder / "summary.json").unlink()
    running, sweep = locked(folder), locked(tmp_path / "sweep")
    out, seen = tmp_path / "report.html", []

    def wait(seconds: float) -> None:
        assert seconds == EVERY
        seen.append(out.read_text())
        assert not (tmp_path / "sweep" / "figures").exists()
        if len(seen) == 1:
            (folder / "summary.json").write_text(summary)
            running.close()
        elif len(seen) == 3:
            job(tmp_path / "sweep" / "1", "strategy=l_dawa", status="failed", reason="no GPU")
            sweep.close()

    monkeypatch.setattr("time.sleep", wait)
    status, printed, _ = command(tmp_path / "sweep", "--out", out, "--watch", EVERY, "--figures", "accuracy")
    assert status == 0
    assert f"{tmp_path / 'sweep' / 'figures'}: accuracy.png" in printed
    refresh = f'http-equiv="refresh" content="{EVERY:.0f}"'
    assert [refresh in page for page in (*seen, out.read_text())] == [True, True, True, False]
    assert "0 of 1 runs finished, 1 running" in seen[0]
    assert "1 of 1 runs finished, 0 running" in seen[1]
    assert seen[1] == seen[2]
    assert "1 of 2 runs finished, 0 running, 1 ended otherwise" in out.read_text()
    assert f"running:\n\n  {folder}: 2 of 2 rounds done\n" in printed
    assert printed.count("knn (%)") == 2  # none at first, and what has not changed is not printed again
    assert f"{tmp_path / 'sweep' / '1'} (strategy=l_dawa): no GPU" in printed
