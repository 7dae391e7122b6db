"""The whole run, as the README's command does it."""

from __future__ import annotations

import pytest
import torch
from e2e.conftest import final_weights, finish, run_folders, samples, steps_of, without_times

from zerogap import metrics
from zerogap.log import read_events


def test_every_step_compares_tokens_and_finds_a_gap_of_exactly_zero(finished):
    steps = steps_of(finished[0])
    assert sorted(steps) == [0, 1, 2, 3]
    for values in steps.values():
        assert values[metrics.GAP_TOKENS] > 0
        assert values[metrics.GAP] == values[metrics.GAP_MAX] == values[metrics.ROLLOUT_KL] == 0.0


def test_the_run_folder_holds_what_the_readme_promises(finished):
    folder, output = finished
    for name in ("config.toml", "events.jsonl", "engine-0.log", "report/report.html", "report/reward.png"):
        assert (folder / name).stat().st_size > 0, name
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert len(list((folder / "samples").glob("*.jsonl"))) == 4
    assert "step 4/4" in output
    assert str(folder / "report" / "report.html") in output


def test_the_checkpoint_loads_in_transformers(finished):
    transformers = pytest.importorskip("transformers")
    folder = finished[0] / "checkpoints" / "step-000004"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours = final_weights(finished[0], 4)
    assert torch.equal(theirs.state_dict()["model.norm.weight"], ours["model.norm.weight"])
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == "</s>"


def test_memory_goes_back_while_the_trainer_works(finished):
    """The engine's tags are resident in the rollout and gone in training, as the system counts them."""
    memory = {e["phase"]: e["tags"] for e in read_events(finished[0] / "events.jsonl") if e["kind"] == "memory"}
    for tag in ("kv_cache", "weights"):
        assert memory["rollout"][tag] > 0
        assert memory["train"][tag] == 0
        assert memory["resume"][tag] > 0 or tag == "kv_cache"


def test_the_same_seed_gives_the_same_run_and_another_seed_another(start, tmp_path, finished):
    finish(start(steps=4))
    (again,) = run_folders(tmp_path)
    first, second = steps_of(finished[0]), steps_of(again)
    assert [without_times(v) for v in first.values()] == [without_times(v) for v in second.values()]
    assert all(samples(finished[0], s) == samples(again, s) for s in range(4))
    one, two = final_weights(finished[0], 4), final_weights(again, 4)
    assert all(torch.equal(one[name], two[name]) for name in one)
    finish(start("run.seed=2", steps=2))
    other = next(f for f in run_folders(tmp_path) if f != again)
    assert samples(other, 0) != samples(again, 0)


def test_a_resumed_run_is_the_straight_run(start, tmp_path, finished):
    """F1, F6, F8, C15: prompts, tokens, rewards, rate and weights are equal; the first rollout uses resumed weights."""
    process = start("checkpoint.every_steps=2", steps=4)
    finish(process)
    (folder,) = run_folders(tmp_path)
    for late in (folder / "checkpoints").glob("step-000004"):
        late.rename(folder / "later")
    (folder / "samples" / "step-0002.jsonl").unlink()
    finish(start("checkpoint.every_steps=2", f"checkpoint.resume={folder}", steps=4))
    straight, resumed = steps_of(finished[0]), steps_of(folder)
    assert [without_times(v) for v in straight.values()] == [without_times(v) for v in resumed.values()]
    assert all(samples(finished[0], s) == samples(folder, s) for s in range(4))
    one, two = final_weights(finished[0], 4), final_weights(folder, 4)
    assert all(torch.equal(one[name], two[name]) for name in one)
