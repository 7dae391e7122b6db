"""Built-in tasks: fixed pools, disjoint also as sets of numbers, half of the held-out items tied."""

from __future__ import annotations

import re

import pytest

from zerogap.errors import DataError
from zerogap.rollout.tasks import TASKS


def _numbers(text: str) -> frozenset[int]:
    return frozenset(map(int, re.findall(r"\d+", text)))


@pytest.mark.parametrize("name", TASKS)
def test_held_out_items_are_no_training_items_in_any_order(name: str) -> None:
    train = {_numbers(row.text) for row in TASKS[name].train()}
    held_out = {_numbers(row.text) for row in TASKS[name].held_out(200)}
    assert len(train) == 2000 and len(held_out) == 200
    assert not train & held_out


@pytest.mark.parametrize("name", TASKS)
def test_half_of_the_held_out_items_are_tied_and_tags_and_labels_are_right(name: str) -> None:
    rows = TASKS[name].held_out(200)
    for row in rows:
        ordered = sorted(_numbers(row.text), reverse=True)
        assert row.label == str(ordered[0])
        assert row.tags == (("tied",) if ordered[0] // 10 == ordered[1] // 10 else ("tens_decide",))
    assert sum(row.tags == ("tied",) for row in rows) == 100


def test_a_smaller_held_out_set_is_the_beginning_of_a_larger_one() -> None:
    assert TASKS["max4"].held_out(200)[:64] == TASKS["max4"].held_out(64)


def test_the_pools_never_change() -> None:
    """Another Python or another commit must not turn held-out items into training items."""
    assert TASKS["max4"].train()[0].text == "What is the largest number: 95, 30, 93, 90?"
    assert TASKS["max4"].held_out(2)[1].text == "What is the largest number: 78, 76, 17, 13?"


def test_asking_for_more_held_out_items_than_there_are_names_the_most() -> None:
    with pytest.raises(DataError, match="tied held-out items") as caught:
        TASKS["cmp2"].held_out(2000)
    most = int(re.findall(r"\d+", caught.value.remedy)[0])
    assert len(TASKS["cmp2"].held_out(most)) == most
