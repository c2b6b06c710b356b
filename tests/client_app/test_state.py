import torch

from client_app.state import load_state, save_state


def state(value):
    return {"target.weight": torch.full((2,), float(value))}


def rounds(folder):
    return sorted(file.name for file in folder.iterdir())


def test_nothing_kept_yet(tmp_path):
    assert load_state(tmp_path / "3", before=1) is None


def test_a_resumed_round_sees_what_was_kept_before_it(tmp_path):
    for round in (1, 2, 5):
        save_state(tmp_path, state(round), round=round, keep_from=0)
    for before, expected in ((2, 1), (3, 2), (5, 2), (6, 5)):
        assert load_state(tmp_path, before=before)["target.weight"][0] == expected
    assert load_state(tmp_path, before=1) is None


def test_versions_that_no_resume_can_ask_for_are_dropped(tmp_path):
    for round in (1, 3, 4):
        save_state(tmp_path, state(round), round=round, keep_from=0)
    # A run that goes back to round 3 at the earliest needs the versions after 3 and 4, not the one after 1.
    save_state(tmp_path, state(6), round=6, keep_from=3)
    assert rounds(tmp_path) == ["round-000003.pt", "round-000004.pt", "round-000006.pt"]


def test_a_round_run_again_replaces_its_state(tmp_path):
    save_state(tmp_path, state(1), round=1, keep_from=0)
    save_state(tmp_path, state(9), round=1, keep_from=0)
    assert load_state(tmp_path, before=2)["target.weight"][0] == 9
    assert rounds(tmp_path) == ["round-000001.pt"]
