"""placement.py: who is paused, who holds memory, in which order."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from zerogap.placement import Colocated, Disaggregated, OneProcess


class Party:
    """Engine and trainer at once: writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name):
        async def call(*args):
            self.calls.append(" ".join([name, *(",".join(a) if not isinstance(a, str) else a for a in args)]))

        return call

    def onload(self) -> None:
        self.calls.append("onload")

    def offload(self) -> None:
        self.calls.append("offload")

    @contextmanager
    def span(self, name):
        self.calls.append(f"({name}")
        yield
        self.calls.append(f"{name})")


async def turns(placement, party: Party) -> list[str]:
    async with placement.trainer_turn(party.span):
        party.calls.append("train")
    async with placement.refit_turn(party.span):
        party.calls.append("refit")
    return party.calls


RELEASE = ["(release", "pause_generation abort", "flush_cache"]
RESUME_CACHE = ["(resume", "resume_memory_occupation kv_cache,cuda_graph", "continue_generation", "resume)"]


async def test_colocated_the_engine_gives_all_back_for_the_trainers_turn_and_takes_the_weights_for_the_refit():
    party = Party()
    assert await turns(Colocated(party, party), party) == [
        *RELEASE, "release_memory_occupation kv_cache,cuda_graph,weights", "onload", "release)", "train", "offload",
        "(resume", "resume_memory_occupation weights", "resume)", "refit", *RESUME_CACHE,
    ]  # fmt: skip


async def test_in_one_process_the_weights_stay():
    party = Party()
    assert await turns(OneProcess(party, party), party) == [
        *RELEASE, "release_memory_occupation kv_cache,cuda_graph", "onload", "release)", "train", "offload",
        "refit", *RESUME_CACHE,
    ]  # fmt: skip


async def test_engines_of_their_own_generate_until_the_refit_itself_pauses_them():
    """What a mode prepares (disk_delta's pull) happens before the pause."""
    party = Party()
    placement = Disaggregated(party)
    assert await turns(placement, party) == ["train", "refit", "(resume", "continue_generation", "resume)"]
    assert placement.refit_pause == "retract"


@pytest.mark.parametrize("placement", [Colocated, OneProcess])
def test_a_refit_of_an_engine_that_its_placement_paused_pauses_nothing(placement):
    assert placement.refit_pause is None
