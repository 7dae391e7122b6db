"""The only place for the bodies and queries of an operator's calls: load, profile, logging, slowing down."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from zerogap.wire.messages import Body

MAX_SLEEP_SECONDS = 10.0
MAX_PROFILED_STEPS = 1000
"""A trace grows by some hundred kilobytes a step, and is held in memory until it is written."""
LOAD_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")


class NoEffect(Body):
    """Base of bodies whose fields this engine knows only in part: one that asks for something else is refused."""

    no_effect: ClassVar[tuple[str, ...]]
    """SGLang's fields that this engine cannot honour; null, false and empty ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_has_no_effect(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in cls.no_effect:
                if data.get(key) not in (None, False, []):
                    raise ValueError(f"`{key}` has no effect in this engine: leave it out")
        return data


class LoadsQuery(Body):
    """`include`: sections with commas between them. Sections that this engine has nothing to say about are left out."""

    dp_rank: Annotated[int, Field(strict=False, ge=0, le=0)] = 0
    include: str = "all"
    format: Literal["json"] = "json"

    @property
    def sections(self) -> frozenset[str]:
        return frozenset(part.strip() for part in self.include.split(","))

    @model_validator(mode="after")
    def _known_sections(self) -> LoadsQuery:
        if unknown := sorted(self.sections - set(LOAD_SECTIONS)):
            raise ValueError(f"unknown section {unknown[0]!r}, expected one of {', '.join(LOAD_SECTIONS)}")
        return self


class RankQuery(Body):
    """The engine is one process: rank 0 is the only one."""

    rank: Annotated[int, Field(strict=False, ge=0, le=0)] = 0


class SlowDownBody(Body):
    """Every step waits this long first; null or 0: not at all."""

    forward_sleep_time: Annotated[float, Field(ge=0, le=MAX_SLEEP_SECONDS)] | None = None


class StartProfileBody(NoEffect):
    """`output_dir` lies inside the server's profile folder; null: that folder. `num_steps` null: as many as may be."""

    no_effect = ("start_step", "profile_by_stage", "merge_profiles", "profile_stages", "detailed_annotations")
    output_dir: str | None = None
    num_steps: Annotated[int, Field(ge=1, le=MAX_PROFILED_STEPS)] | None = None
    activities: list[Literal["CPU", "GPU", "MEM"]] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")] | None = None
    profile_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")] | None = None


class ConfigureLoggingBody(NoEffect):
    no_effect = ("log_requests", "dump_requests_folder", "crash_dump_folder")
    log_level: Literal["debug", "info", "warning", "error"] | None = None
