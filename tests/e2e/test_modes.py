"""The quickstart's task in every transfer mode: the same tokens, rewards and weights as the run that takes turns."""

from __future__ import annotations

import pytest
from e2e.conftest import finish, run_folders
from e2e.test_disaggregated import DISAGGREGATED, assert_same_run
from support.modes import IN_EVERY_MODE

MODES = {
    "broadcast": (DISAGGREGATED, "engine.count=2"),
    "broadcast_packed": (DISAGGREGATED,),
    "p2p": (DISAGGREGATED,),
}
"""Mode -> what it needs beside it. `ipc` is the mode of the other end-to-end tests."""


@pytest.mark.parametrize("mode", [param for param in IN_EVERY_MODE if param.values[0] in MODES])
def test_a_run_in_this_mode_is_the_run_that_takes_turns(mode, start, tmp_path, finished):
    output = finish(start(f"refit.mode={mode}", *MODES[mode], steps=4))
    (folder,) = run_folders(tmp_path)
    assert_same_run(finished[0], folder, 4)
    assert ("69% to 72% slower" in output) == (mode == "p2p")


def test_a_run_in_one_process_that_moves_no_weight_is_the_same_run(start, tmp_path, finished):
    finish(start("refit.mode=shared", steps=4))
    (folder,) = run_folders(tmp_path)
    assert_same_run(finished[0], folder, 4)
    assert not list(folder.glob("engine-*.log"))
