"""A run file: every fault at once, each value's origin, and no option without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerogap.config.load import COMMAND_LINE, DEFAULT, load, options, to_toml
from zerogap.config.schema import BUILTIN_REWARDS, RunConfig
from zerogap.errors import ConfigError
from zerogap.rollout.tasks import TASKS


def _faults(path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return caught.value.details["faults"]


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_fault_is_reported_at_once_with_file_key_and_a_hint(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        "steps = 3\n[trainr]\nlr = 1.0\n[trainer]\nlr = -1.0\nschedule = 'lineer'\n[data]\ntask = 'max5'\n",
    )
    faults = _faults(path, "samples_per_prompt=4", "oops", "sampling.max_new_tokens=0")
    expected = [
        ["'steps'", "outside of a section"],
        ["'trainr.lr'", "run.toml", "did you mean 'trainer.lr'"],
        ["'samples_per_prompt'", COMMAND_LINE, "did you mean 'data.samples_per_prompt'"],
        ["'oops'", "section.key=value"],
        ["trainer.lr=-1.0", "run.toml", "greater than 0"],
        ["trainer.schedule='lineer'", "did you mean 'linear'"],
        ["data.task='max5'", "did you mean 'max4'"],
        ["sampling.max_new_tokens=0", COMMAND_LINE],
    ]
    assert len(faults) == len(expected)
    for parts in expected:
        assert sum(all(part in fault for part in parts) for fault in faults) == 1, parts


def test_a_rule_is_judged_beside_faults_of_other_options() -> None:
    faults = _faults(None, "data.task=max4", "trainer.lr=-1", "trainer.kl_kind=k2")
    assert len(faults) == 2
    assert any("trainer.kl_kind" in f and "trainer.kl_weight=0" in f for f in faults)


def test_a_rule_about_an_option_that_is_wrong_by_itself_says_nothing() -> None:
    faults = _faults(None, "data.task=max5")
    assert len(faults) == 1


def test_each_value_carries_its_origin(tmp_path: Path) -> None:
    path = _write(tmp_path, "[data]\ntask = 'max4'\n[trainer]\nlr = 1e-5\nwarmup_steps = 1\n")
    resolved = load(path, ["trainer.lr=2e-6"])
    assert resolved.config.trainer.lr == 2e-6
    assert resolved.origins["trainer.lr"] == COMMAND_LINE
    assert resolved.origins["trainer.warmup_steps"] == str(path)
    assert resolved.origins["trainer.betas"] == DEFAULT
    assert set(resolved.origins) == set(options())


def test_the_resolved_run_reads_back_to_itself(tmp_path: Path) -> None:
    resolved = load(None, ['data.path=a "b".jsonl', "sampling.stop_token_ids=[0, 2]", "trainer.betas=[0.9, 0.99]"])
    text = to_toml(resolved.config, resolved.origins)
    assert load(_write(tmp_path, text)).config == resolved.config
    assert "lr = 2e-05  # default" in text
    assert f"stop_token_ids = [0, 2]  # {COMMAND_LINE}" in text


def test_text_options_take_what_looks_like_a_number_as_it_stands() -> None:
    assert load(None, ["data.task=max4", "run.name=1e5"]).config.run.name == "1e5"
    assert load(None, ['data.task="max4"']).config.data.task == "max4"


@pytest.mark.parametrize("value", ["true", '"8"', "8.0"])
def test_a_count_must_be_a_whole_number(value: str) -> None:
    assert "data.prompts_per_step" in _faults(None, "data.task=max4", f"data.prompts_per_step={value}")[0]


def test_an_option_given_twice_is_an_error() -> None:
    assert "trainer.lr is given twice" in _faults(None, "data.task=max4", "trainer.lr=1e-5", "trainer.lr=1e-6")[0]


def test_a_missing_or_broken_file_is_one_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML.*line 2"):
        load(_write(tmp_path, "[run]\nname = \n"))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([], ["data.task", "data.path"]),
        (["data.task=max4", "data.path=x.jsonl"], ["data.task", "data.path"]),
        (["data.task=max4", "data.label_key=a"], ["data.label_key", "data.task"]),
        (["data.path=x.jsonl", "eval.every_steps=2"], ["eval.every_steps", "data.held_out_path"]),
        (["data.path=x.jsonl", "data.held_out_path=x.jsonl"], ["data.path", "data.held_out_path"]),
        (["data.task=max4", "eval.num_prompts=0", "eval.sampled=true"], ["eval.sampled", "eval.num_prompts=0"]),
        (["data.task=max4", "checkpoint.every_steps=50"], ["checkpoint.every_steps", "run.steps"]),
        (["data.task=max4", "reward.kind=exact_intger"], ["reward.kind", "did you mean 'exact_integer'"]),
        (["data.task=max4", "reward.time_limit_seconds=3"], ["reward.time_limit_seconds", "reward.kind"]),
        (["data.task=max4", "reward.unfinished_penalty=1.5"], ["reward.unfinished_penalty", "reward.kind"]),
        (["data.task=max4", "sampling.top_k=1"], ["sampling.top_k=1", "data.samples_per_prompt"]),
        (["data.task=max4", "engine.num_kv_tokens=512"], ["engine.num_kv_tokens", "data.max_prompt_tokens"]),
        (["data.task=max4", "trainer.schedule=constant", "trainer.final_lr_ratio=0.5"],
         ["trainer.final_lr_ratio", "trainer.schedule"]),
        (["data.task=max4", "run.steps=3", "trainer.warmup_steps=3"], ["trainer.warmup_steps", "run.steps"]),
        (["data.task=max4", 'engine.urls=["http://127.0.0.1:1"]', "engine.threads=2"],
         ["engine.threads", "engine.urls"]),
        (["data.task=max4", 'engine.urls=["http://far:1"]'], ["engine.urls", "refit.mode"]),
        (["data.task=max4", 'engine.urls=["http://127.0.0.1:1"]'], ["engine.urls", "placement.kind"]),
        (["data.task=max4", "refit.mode=broadcast"], ["refit.mode='broadcast'", "placement.kind='colocated'"]),
        (["data.task=max4", "refit.mode=broadcast_packed"], ["refit.mode='broadcast_packed'", "placement.kind"]),
        (["data.task=max4", "refit.mode=p2p"], ["refit.mode='p2p'", "placement.kind='colocated'"]),
        (["data.task=max4", "engine.count=2"], ["engine.count", "placement.kind"]),
        (["data.task=max4", "placement.kind=disaggregated", 'engine.urls=["http://127.0.0.1:1"]', "engine.count=2"],
         ["engine.count", "engine.urls"]),
    ],
)  # fmt: skip
def test_options_that_contradict_or_have_no_effect_are_named_together(overrides: list[str], named: list[str]) -> None:
    """I6: nothing is overridden in silence."""
    faults = _faults(None, *overrides)
    assert any(all(name in fault for name in named) for fault in faults), faults


def test_truncated_sampling_trains_only_on_an_engine_known_to_return_raw_logprobs() -> None:
    """A4: renormalised logprobs make the ratio wrong by the kept mass."""
    cut = ["data.task=max4", "sampling.top_p=0.8"]
    assert load(None, cut).config.sampling.top_p == 0.8
    (fault,) = _faults(None, *cut, 'engine.urls=["http://127.0.0.1:1"]', "placement.kind=disaggregated")
    assert "sampling.top_p=0.8" in fault and "engine.urls" in fault


def test_every_option_has_a_help_line_and_a_type() -> None:
    for option in options().values():
        assert option.help, option.key
        assert option.type != "value", option.key


def test_the_names_in_the_schema_are_those_that_exist() -> None:
    assert options()["data.task"].type == " | ".join(f'"{name}"' for name in TASKS)
    for kind in BUILTIN_REWARDS:
        assert load(None, ["data.task=max4", f"reward.kind={kind}"]).config.reward.kind == kind


def test_a_run_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().trainer.lr = 1.0  # type: ignore[misc]
