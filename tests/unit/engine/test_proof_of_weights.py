"""The checker finds one flipped byte in any weight, wherever the engine keeps it, and says what the check cost."""

from __future__ import annotations

import pytest
import torch
from support.cores import control, running_core
from support.tiny import TINY_QWEN2, TINY_UNTIED, tiny_decoder, tiny_folder
from unit.engine.test_core import refit

from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.errors import EngineRejected
from zerogap.weights.manifest import tensor_digests

FUSED = [f"model.layers.1.{part}" for part in (
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_proj.bias",
    "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    "input_layernorm.weight")]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "names"),
    [(TINY_QWEN2, [*FUSED, "model.embed_tokens.weight", "model.norm.weight"]), (TINY_UNTIED, ["lm_head.weight"])],
    ids=["tied", "untied"],
)
def test_one_flipped_byte_is_named(tmp_path, config, names):
    """C24: parts of fused weights, a tied head (the embedding), a head of its own, biases, norms."""
    with running_core(tiny_folder(tmp_path / "model", config)) as core:
        assert set(names) <= set(core.weights.tensors)
        for name in names:
            reply = control(core, "weights_checker", action="snapshot")
            assert reply["seconds"] >= 0
            core.weights.tensors[name].view(torch.uint8).view(-1)[0] ^= 1
            with pytest.raises(EngineRejected, match=rf"^1 weights differ from the snapshot: {name}\n"):
                control(core, "weights_checker", action="compare")


def test_weights_that_are_to_be_skipped_are_left_out_of_every_action(tmp_path):
    """Reference 6: `skip_tensor_list` holds parts of names."""
    with running_core(tiny_folder(tmp_path / "model", TINY_UNTIED)) as core:
        (rank,) = control(core, "weights_checker", action="checksum", skip=["mlp.", "norm"])["ranks"]
        assert rank["checksums"] and not any("mlp" in name or "norm" in name for name in rank["checksums"])
        assert rank["parallelism_info"][0]["tp_size"] == 1
        control(core, "weights_checker", action="snapshot")
        control(core, "weights_checker", action="reset_tensors", skip=["mlp."])
        assert core.weights.tensors["model.layers.0.mlp.up_proj.weight"].isfinite().all()
        assert not core.weights.tensors["model.norm.weight"].isfinite().any()
        control(core, "weights_checker", action="compare", skip=["norm", "self_attn", "embed", "lm_head"])
        control(core, "weights_checker", action="snapshot", skip=["mlp."])
        core.weights.tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
        control(core, "weights_checker", action="compare")


async def test_the_tables_of_positions_are_the_trainers_and_survive_a_release(tmp_path):
    """A17: they are no weights, so nobody sends them again: fp32 on both sides, whatever the dtype of the weights."""
    trainer = tiny_decoder(dtype=torch.bfloat16)
    expected = dict(trainer.named_buffers())
    assert expected and {table.dtype for table in expected.values()} == {torch.float32}
    core = EngineCore(
        tiny_folder(tmp_path / "model", dtype=torch.bfloat16), EngineSettings(threads=1), dtype="bfloat16"
    )
    core.start()
    try:
        control(core, "release_memory_occupation", tags=["weights", "kv_cache"])
        control(core, "resume_memory_occupation", tags=["weights", "kv_cache"])
        await refit(core, trainer.hf_tensors())
        assert tensor_digests(dict(core.runner.decoder.named_buffers())) == tensor_digests(expected)
    finally:
        core.stop(20.0)
