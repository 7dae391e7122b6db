"""A resumed run is the straight run, and a checkpoint is there whole or not at all."""

from __future__ import annotations

import random

import pytest
import torch
from support.learning import MAX_NEW, refit, rollout
from support.tiny import TINY_QWEN3, tiny_decoder, tiny_folder

from zerogap import metrics
from zerogap.config.schema import TrainerSettings
from zerogap.engine.runner import Runner
from zerogap.errors import CheckpointError
from zerogap.model.registry import load_decoder
from zerogap.rollout.advantage import make_batch
from zerogap.trainer import checkpoint
from zerogap.trainer.checkpoint import Progress
from zerogap.trainer.trainer import Trainer

SETTINGS = TrainerSettings(lr=3e-2, warmup_steps=3, schedule="cosine", kl_weight=0.05)


def make_trainer(dtype=torch.float32, settings=SETTINGS, seed=1):
    return Trainer(tiny_decoder(seed=seed, dtype=dtype), settings, num_steps=6, max_new_tokens=MAX_NEW)


def run(trainer, first, last):
    """Steps first .. last - 1: what was sampled, its rewards and the metrics of each."""
    runner = Runner(
        tiny_decoder(seed=2, dtype=trainer.decoder.dtype), num_kv_tokens=1024, max_running=64, prefill_tokens=64
    )
    seen = []
    for step in range(first, last):
        refit(runner, trainer)
        groups = rollout(runner, step)
        stats = trainer.train_step(make_batch(step, 1.0, groups, "group_norm")).metrics
        seen.append(([(s.response_ids, s.reward) for g in groups for s in g.samples], stats))
    return seen


def progress(steps):
    return Progress(steps, {"epoch": 0, "position": 6 * steps}, {"weight_version": steps})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_straight_run_bit_for_bit(tmp_path, dtype):
    """F1, F6, F8: tokens, rewards, every metric (rate, loss, norm, KL, gap) and weights, over two resumes."""
    straight = make_trainer(dtype)
    expected = run(straight, 0, 6)
    assert len({tokens for tokens, _ in expected[-1][0]}) > 1
    interrupted, seen = make_trainer(dtype), []
    for first, last in ((0, 2), (2, 3), (3, 6)):
        if first:
            interrupted = make_trainer(dtype)
            done = checkpoint.load(checkpoint.latest(tmp_path), interrupted)
            assert done == progress(first)
        seen += run(interrupted, first, last)
        checkpoint.save(tmp_path, interrupted, progress(last), copy_from=None)
    for now, then in zip(seen, expected, strict=True):
        assert now == then
        assert now[1][metrics.GAP_MAX] == 0.0
    for part in (lambda t: t.hf_tensors(), lambda t: t.optimizer.state()):
        one, two = part(straight), part(interrupted)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_checkpoint_is_a_model_folder(tmp_path):
    """Weights, config and the companion files of the model that the run started from."""
    source = tiny_folder(tmp_path / "model")
    (source / "tokenizer.json").write_text("{}")
    trainer = make_trainer()
    folder = checkpoint.save(tmp_path / "runs", trainer, progress(0), copy_from=source)
    loaded = load_decoder(folder).hf_tensors()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trainer.hf_tensors().items())
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_random_state_goes_on_where_it_was(tmp_path):
    trainer = make_trainer()
    folder = checkpoint.save(tmp_path, trainer, progress(0), copy_from=None)
    expected = random.random(), torch.rand(3)
    random.seed(0)
    torch.manual_seed(0)
    checkpoint.load(folder, trainer)
    assert random.random() == expected[0]
    assert torch.equal(torch.rand(3), expected[1])


def test_a_save_that_fails_leaves_the_earlier_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    trainer = make_trainer()
    first = checkpoint.save(tmp_path, trainer, progress(1), copy_from=None)

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save(tmp_path, trainer, progress(step), copy_from=None)
    assert [p.name for p in tmp_path.iterdir()] == [first.name]
    checkpoint.load(first, trainer)


def test_what_a_killed_save_left_is_never_resumed_from_and_goes_with_the_next(tmp_path):
    trainer = make_trainer()
    checkpoint.save(tmp_path, trainer, progress(9), copy_from=None)
    whole = checkpoint.save(tmp_path, trainer, progress(10), copy_from=None)
    (tmp_path / ".step-000011.partial").mkdir()
    (tmp_path / "step-000012").mkdir()
    assert checkpoint.latest(tmp_path) == whole
    checkpoint.save(tmp_path, trainer, progress(13), copy_from=None)
    assert not list(tmp_path.glob(".*"))


def test_the_same_step_may_be_saved_again(tmp_path):
    trainer = make_trainer()
    checkpoint.save(tmp_path, trainer, progress(1), copy_from=None)
    with torch.no_grad():
        trainer.decoder.norm.fill_(7.0)
    folder = checkpoint.save(tmp_path, trainer, progress(1), copy_from=None)
    other = make_trainer()
    checkpoint.load(folder, other)
    assert (other.decoder.norm == 7.0).all()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_there_is_no_latest_in_an_empty_place(tmp_path):
    assert checkpoint.latest(tmp_path) is checkpoint.latest(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("trainer/state.json", '{"format": 1'),
        ("trainer/state.json", '{"format": 1}'),
        ("trainer/state.json", '{"format": 99}'),
        ("trainer/optimizer.safetensors", "cut"),
        ("model.safetensors", "cut"),
    ],
)
def test_a_damaged_checkpoint_is_an_error_and_never_a_fresh_start(tmp_path, file, content):
    folder = checkpoint.save(tmp_path, make_trainer(), progress(1), copy_from=None)
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder, make_trainer())
    assert caught.value.remedy


def test_a_checkpoint_of_another_model_or_dtype_is_refused(tmp_path):
    trainer = make_trainer()
    run(trainer, 0, 1)
    folder = checkpoint.save(tmp_path, trainer, progress(1), copy_from=None)
    other = Trainer(tiny_decoder(TINY_QWEN3), SETTINGS, num_steps=6, max_new_tokens=MAX_NEW)
    with pytest.raises(CheckpointError, match="q_norm"):
        checkpoint.load(folder, other)
    with pytest.raises(CheckpointError, match="master/"):
        checkpoint.load(folder, make_trainer(torch.bfloat16))
