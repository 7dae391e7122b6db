"""The only place for a run's options: their names, types, bounds, defaults and one line of help each.

Bounds of one option stand here; a rule that joins two options stands in `rules`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_BUCKET_BYTES = 64 << 20
"""Small enough that the next bucket is made while the engine loads this one."""


class Section(BaseModel):
    """Base of every table of a run file: frozen, strict about types, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


def _all_or_some(top_k: int) -> int:
    if top_k == 0:
        raise ValueError("0 would keep no token; use -1 for all tokens")
    return top_k


BuiltinTask = Literal["max4", "cmp2"]
BUILTIN_REWARDS = ("exact_integer", "last_number", "math")


class RunSettings(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", description="part of the run folder's name")] = "run"
    seed: Annotated[
        int, Field(ge=0, lt=2**63, description="data order and sampling; the same seed gives the same run")
    ] = 1
    dir: Annotated[str, Field(min_length=1, description="folder that holds the run folders")] = "runs"
    steps: Annotated[int, Field(gt=0, description="passes of the loop: rollout, train, refit")] = 24


class ModelSettings(Section):
    path: Annotated[
        str, Field(min_length=1, description="Hugging Face folder, or the built-in name smollm2-135m-instruct")
    ] = "smollm2-135m-instruct"
    dtype: Annotated[Literal["float32", "bfloat16"], Field(description="compute dtype of engine and trainer")] = (
        "float32"
    )
    device: Annotated[Literal["cpu", "cuda"], Field(description="of engine and trainer; cuda needs bfloat16")] = "cpu"


class DataSettings(Section):
    task: Annotated[BuiltinTask | None, Field(description="built-in task; or give data.path")] = None
    path: Annotated[
        str | None, Field(min_length=1, description="JSONL or Parquet file of prompts; or give data.task")
    ] = None
    held_out_path: Annotated[
        str | None, Field(min_length=1, description="prompts for the evaluation, beside data.path")
    ] = None
    prompt_key: Annotated[str, Field(min_length=1, description="column of the prompt: text, or chat messages")] = (
        "prompt"
    )
    label_key: Annotated[str, Field(min_length=1, description="column of the reference answer")] = "label"
    id_key: Annotated[
        str | None, Field(min_length=1, description="column of the prompt's id; without it the row number")
    ] = None
    system_prompt: Annotated[str | None, Field(description="system message before each text prompt")] = None
    prompts_per_step: Annotated[int, Field(gt=0, description="prompt groups in one step")] = 16
    samples_per_prompt: Annotated[int, Field(ge=2, description="samples in one prompt group")] = 8
    max_prompt_tokens: Annotated[int, Field(gt=0, description="longer prompts are skipped and counted")] = 1024


class SamplingSettings(Section):
    temperature: Annotated[float, Field(gt=0, description="divides the logits, in engine and trainer alike")] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, description="keep the smallest set of this mass; 1: all tokens")] = 1.0
    top_k: Annotated[
        int, Field(ge=-1, description="keep the k likeliest tokens; -1: all"), AfterValidator(_all_or_some)
    ] = -1
    min_p: Annotated[float, Field(ge=0, le=1, description="drop tokens below this share of the likeliest")] = 0.0
    max_new_tokens: Annotated[int, Field(gt=0, description="a response that reaches this is cut")] = 12
    stop_token_ids: Annotated[
        tuple[int, ...], Field(strict=False, description="end a response, beside the model's own EOS")
    ] = ()


class RewardSettings(Section):
    kind: Annotated[str, Field(description="exact_integer, last_number, math, or your module:function")] = (
        "exact_integer"
    )
    time_limit_seconds: Annotated[float, Field(gt=0, description="for one answer; math and module:function only")] = (
        10.0
    )
    num_workers: Annotated[int, Field(gt=0, description="grading processes; math and module:function only")] = 2
    unfinished_penalty: Annotated[float, Field(ge=0, description="taken off when a response is cut (shaping)")] = 0.0


class EngineSettings(Section):
    urls: Annotated[
        tuple[str, ...], Field(strict=False, description="engines that already run; empty: start them")
    ] = ()
    api_key_env: Annotated[
        str | None, Field(min_length=1, description="environment variable that holds the key of engine.urls")
    ] = None
    count: Annotated[int, Field(ge=1, le=64, description="engines to start; more than 1: disaggregated")] = 1
    num_kv_tokens: Annotated[int, Field(ge=256, description="capacity of the KV cache in tokens")] = 16384
    max_running_requests: Annotated[int, Field(gt=0, description="samples decoded together")] = 256
    chunk_size: Annotated[int, Field(ge=16, description="most prompt tokens computed in one engine step")] = 1024
    threads: Annotated[int, Field(ge=0, description="compute threads; 0: one per core")] = 0
    startup_deadline_seconds: Annotated[float, Field(gt=0, description="until the engine answers")] = 120.0
    call_deadline_seconds: Annotated[float, Field(gt=0, description="for each call but generate")] = 60.0
    rollout_deadline_seconds: Annotated[float, Field(gt=0, description="for all samples of one step")] = 600.0


class TrainerSettings(Section):
    lr: Annotated[float, Field(gt=0, description="peak learning rate")] = 2e-5
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        Field(strict=False, description="AdamW"),
    ] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, description="AdamW")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, description="AdamW")] = 0.0
    warmup_steps: Annotated[int, Field(ge=0, description="the rate rises linearly over these")] = 2
    schedule: Annotated[Literal["linear", "cosine", "constant"], Field(description="of the rate after warm-up")] = (
        "linear"
    )
    final_lr_ratio: Annotated[float, Field(ge=0, le=1, description="the rate at the end, as a share of lr")] = 0.1
    clip_grad_norm: Annotated[float, Field(gt=0, description="the gradient's norm is scaled down to this")] = 1.0
    clip_low: Annotated[float, Field(gt=0, lt=1, description="the ratio is clipped at 1 - clip_low")] = 0.2
    clip_high: Annotated[float, Field(gt=0, description="the ratio is clipped at 1 + clip_high")] = 0.28
    advantage: Annotated[
        Literal["group_norm", "mean_only", "leave_one_out"], Field(description="reward -> advantage, per group")
    ] = "group_norm"
    loss_normaliser: Annotated[
        Literal["token_mean", "sequence_mean", "constant"], Field(description="what the token sum is divided by")
    ] = "constant"
    kl_weight: Annotated[float, Field(ge=0, description="pull to the starting model; 0: no reference is kept")] = 0.0
    kl_kind: Annotated[Literal["k1", "k2", "k3"], Field(description="estimator of the KL term")] = "k3"
    micro_batch_groups: Annotated[int, Field(gt=0, description="bounds memory; never changes the result")] = 4
    activation_checkpointing: Annotated[
        bool, Field(description="keep only the blocks' borders for the backward: less memory, the same bits, more time")
    ] = False
    score_share: Annotated[
        float, Field(ge=0, le=1, description="share of the untrained samples that are scored for the gap")
    ] = 0.1
    threads: Annotated[int, Field(ge=0, description="compute threads; 0: one per core")] = 0


class NumericsSettings(Section):
    on_gap: Annotated[Literal["stop", "warn"], Field(description="what a logprob gap above 0 does to the run")] = "stop"


class RefitSettings(Section):
    mode: Annotated[
        Literal["ipc", "shared", "broadcast", "broadcast_packed", "p2p", "disk_delta"],
        Field(description="transfer mode (docs/refit.md); ipc: shared memory on one host"),
    ] = "ipc"
    max_bucket_bytes: Annotated[int, Field(ge=1 << 20, description="weights that travel together")] = MAX_BUCKET_BYTES
    deadline_seconds: Annotated[float, Field(gt=0, description="for one whole refit")] = 120.0
    folder: Annotated[
        str | None, Field(min_length=1, description="disk_delta: folder that trainer and engines see; none: the run's")
    ] = None
    snapshot_every: Annotated[int, Field(ge=1, description="disk_delta: refits between two snapshots")] = 16
    keep: Annotated[int, Field(ge=1, description="disk_delta: newest versions that stay, and what they need")] = 4


class EvalSettings(Section):
    num_prompts: Annotated[int, Field(ge=0, description="held-out prompts; 0: no evaluation")] = 200
    every_steps: Annotated[int, Field(ge=0, description="0: before the first step and after the last only")] = 0
    sampled: Annotated[bool, Field(description="beside greedy, also at the training temperature")] = False


class CheckpointSettings(Section):
    every_steps: Annotated[int, Field(ge=0, description="0: at the end only")] = 0
    resume: Annotated[str | None, Field(min_length=1, description="run folder to go on with")] = None


class PlacementSettings(Section):
    kind: Annotated[
        Literal["colocated", "disaggregated"],
        Field(description="engine and trainer take turns on one device, or each has its own"),
    ] = "colocated"


class RunConfig(Section):
    """One run, resolved. Frozen: nothing changes an option after validation."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    sampling: SamplingSettings = SamplingSettings()
    reward: RewardSettings = RewardSettings()
    engine: EngineSettings = EngineSettings()
    trainer: TrainerSettings = TrainerSettings()
    numerics: NumericsSettings = NumericsSettings()
    refit: RefitSettings = RefitSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    placement: PlacementSettings = PlacementSettings()
