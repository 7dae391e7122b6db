"""Rewards: right, wrong, and failed are three things."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from zerogap.config.schema import RewardSettings
from zerogap.errors import ConfigError
from zerogap.rollout.rewards import Reward, Verdict, make_reward, open_reward
from zerogap.types import Prompt

USER = "support.user_rewards"


def _prompt(label: object, text: str = "q") -> Prompt:
    return Prompt("s", "1", text, label, (1,))


async def _raw(kind: str, response: str, label: object) -> float | None:
    return (await make_reward(RewardSettings(kind=kind)).score(_prompt(label), response)).raw


@pytest.mark.parametrize(
    ("response", "raw", "in_form"),
    [
        ("83", 1.0, True),
        ("The largest number is 83.", 1.0, True),
        ("39", 0.0, True),
        ("-83", 0.0, True),
        ("39, 67, 57, 83", 0.0, False),
        ("83 83", 0.0, False),
        ("8.3", 0.0, False),
        ("eighty-three", 0.0, False),
        ("", 0.0, False),
        ("٨٣", 0.0, False),
        ("9" * 5000, 0.0, False),
    ],
)
async def test_exact_integer_pays_for_one_integer_and_the_right_one(response: str, raw: float, in_form: bool) -> None:
    """G12: listing every option earns nothing."""
    verdict = await make_reward(RewardSettings(kind="exact_integer")).score(_prompt("83"), response)
    assert (verdict.raw, verdict.in_form) == (raw, in_form)


async def test_last_number_is_hackable_and_exact_integer_is_not() -> None:
    """The documented example: the policy learns to end on the right number of a wrong sentence."""
    hack = "31 is larger than 84."
    assert await _raw("last_number", hack, "84") == 1.0
    assert await _raw("exact_integer", hack, "84") == 0.0


@pytest.mark.parametrize(
    ("response", "label", "raw"),
    [("-3", "-3", 1.0), ("3", "-3", 0.0), ("1,000", "1000", 1.0), ("$18.", "18", 1.0), ("0.50", "0.5", 1.0)],
)
async def test_last_number_reads_signs_commas_and_units(response: str, label: str, raw: float) -> None:
    """G4"""
    assert await _raw("last_number", response, label) == raw


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def math() -> AsyncIterator[Reward]:
    async with open_reward(RewardSettings(kind="math", time_limit_seconds=5.0)) as reward:
        yield reward


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("response", "label", "raw"),
    [
        ("-3", "-3", 1.0),
        ("3", "-3", 0.0),
        ("1,000", "1000", 1.0),
        ("$18.", "18", 1.0),
        ("0.50", "1/2", 1.0),
        (r"\boxed{1/3}", "1/3", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"so \boxed{\frac{1}{2}}, not 7", "0.5", 1.0),  # the box comes before the last number
        ("first 7, then 9", 9, 1.0),
        (r"\boxed{7} or \boxed{9}", "9", 0.0),
        (r"\boxed{9} again \boxed{9}", "9", 1.0),
        (r"\boxed{9", "9", 0.0),
        ("I do not know", "4", 0.0),
    ],
)
async def test_math_grades_equal_expressions(math: Reward, response: str, label: object, raw: float) -> None:
    """G4, G12"""
    assert (await math.score(_prompt(label), response)).raw == raw


@pytest.mark.asyncio(loop_scope="module")
async def test_absurd_answers_are_wrong_within_the_limit_and_exhaust_no_worker(math: Reward) -> None:
    """G2"""
    answers = ["9^9^9^9", "{" * 10_000 + "}" * 10_000, r"\boxed{9^{9^{9^9}}}", "99999999!", "2**2**2**2**2"] * 20
    start = time.monotonic()
    verdicts = await asyncio.gather(*(math.score(_prompt("5"), answer) for answer in answers))
    assert [v.raw for v in verdicts] == [0.0] * 100
    assert time.monotonic() - start < 5.0
    assert (await math.score(_prompt("5"), "5")).raw == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_is_not_executed(math: Reward, tmp_path: Path) -> None:
    """G6"""
    target = tmp_path / "pwned"
    for form in ("{}", r"\boxed{{{}}}", "${}$"):
        verdict = await math.score(_prompt("5"), form.format(f"__import__('os').system('touch {target}')"))
        assert verdict.raw == 0.0
    assert not target.exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_label_that_is_no_mathematics_is_a_failure_not_a_wrong_answer(math: Reward) -> None:
    verdict = await math.score(_prompt("{{{"), "4")
    assert (verdict.raw, verdict.failure) == (None, "crash")
    assert "the label" in verdict.detail


async def test_math_grades_off_the_main_thread() -> None:
    """G1: a time limit by signal works in the main thread only, and made every grade elsewhere a silent 0."""

    async def grade() -> float | None:
        async with open_reward(RewardSettings(kind="math", num_workers=1)) as reward:
            return (await reward.score(_prompt("1/3"), r"\boxed{1/3}")).raw

    assert await asyncio.to_thread(asyncio.run, grade()) == 1.0


def test_math_grades_in_a_subprocess() -> None:
    """G1"""
    program = (
        "import asyncio\n"
        "from zerogap.config.schema import RewardSettings\n"
        "from zerogap.rollout.rewards import open_reward\n"
        "from zerogap.types import Prompt\n"
        "async def main():\n"
        "    async with open_reward(RewardSettings(kind='math', num_workers=1)) as reward:\n"
        "        print((await reward.score(Prompt('s', '1', 'q', '1/3', (1,)), r'\\boxed{1/3}')).raw)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1.0\n"


async def test_failures_of_a_users_function_are_told_apart_and_never_0() -> None:
    """G8, G2: the pool replaces a worker that hung or died and goes on."""
    settings = RewardSettings(kind=f"{USER}:misbehaving", time_limit_seconds=1.0, num_workers=1)
    async with open_reward(settings) as reward:

        async def verdict(response: str) -> Verdict:
            return await reward.score(_prompt("1"), response)

        assert (await verdict("fine")).raw == 1.0
        crash = await verdict("raise")
        assert (crash.raw, crash.failure) == (None, "crash") and "the judge is down" in crash.detail
        for response, failure in [
            ("hang", "timeout"),
            ("die", "crash"),
            ("nan", "no_number"),
            ("text", "no_number"),
            ("none", "no_number"),
        ]:
            got = await verdict(response)
            assert (got.raw, got.failure) == (None, failure), response
            assert (await verdict("fine")).raw == 1.0, response


async def test_closing_a_reward_ends_its_processes() -> None:
    async with open_reward(RewardSettings(kind=f"{USER}:misbehaving", num_workers=1)) as reward:
        pid = int((await reward.score(_prompt("1"), "pid")).raw or 0)
        assert pid not in (0, os.getpid())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal on a parent's death is Linux's")
def test_a_grading_process_does_not_outlive_a_killed_run() -> None:
    program = (
        "import asyncio, os, signal\n"
        "from zerogap.config.schema import RewardSettings\n"
        "from zerogap.rollout.rewards import open_reward\n"
        "from zerogap.types import Prompt\n"
        "async def main():\n"
        f"    settings = RewardSettings(kind='{USER}:misbehaving', num_workers=1, time_limit_seconds=60.0)\n"
        "    async with open_reward(settings) as reward:\n"
        "        prompt = Prompt('s', '1', 'q', '1', (1,))\n"
        "        print(int((await reward.score(prompt, 'pid')).raw), flush=True)\n"
        "        asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGKILL)\n"
        "        await reward.score(prompt, 'hang')\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=False, env=environment
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_a_users_function_gets_what_it_names() -> None:
    async with open_reward(RewardSettings(kind=f"{USER}:length", num_workers=1)) as reward:
        assert (await reward.score(_prompt(3), "abc")).raw == 1.0
    async with open_reward(RewardSettings(kind=f"{USER}:takes_all", num_workers=1)) as reward:
        assert (await reward.score(_prompt(3), "abc")).raw == 1.0


async def test_an_async_function_is_cancelled_at_the_limit() -> None:
    async with open_reward(RewardSettings(kind=f"{USER}:judge", time_limit_seconds=0.2)) as reward:
        assert (await reward.score(_prompt(0, "a"), "a")).raw == 1.0
        assert (await reward.score(_prompt(0, "a"), "raise")).failure == "crash"
        start = time.monotonic()
        assert (await reward.score(_prompt(0, "a"), "hang")).failure == "timeout"
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("no_such_module:f", "does not import"),
        (f"{USER}:lenght", "did you mean 'length'"),
        (f"{USER}:NOT_A_FUNCTION", "no function"),
        (f"{USER}:wants_more", "called by name with any of response, label, prompt"),
    ],
)
def test_a_users_function_is_checked_before_the_run(kind: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_reward(RewardSettings(kind=kind))


def test_a_verdict_is_a_number_or_a_failure() -> None:
    for raw, failure in [(None, None), (1.0, "crash"), (float("nan"), None)]:
        with pytest.raises(ValueError, match="verdict"):
            Verdict(raw, failure)  # type: ignore[arg-type]
