"""Who may call what, from where, how much, and which folders: the server's edge."""

from __future__ import annotations

import asyncio
import base64
import pickle
from pathlib import Path

import httpx
import pytest
from support.fake_core import FakeCore, served

from zerogap.client.http import EngineClient
from zerogap.engine.options import ServiceOptions, keys_from_environment
from zerogap.engine.server import bind
from zerogap.errors import ConfigError, EngineRejected
from zerogap.wire.routes import ROUTES

ONE = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def statuses(tmp_path: Path, options: ServiceOptions, headers: dict[str, str]) -> dict[str, int]:
    """Of every GET-or-POST route without a body of sense: 401 and 403 come before anything is read."""
    async with (
        served(FakeCore(), tmp_path, options=options) as url,
        httpx.AsyncClient(base_url=url, timeout=10, trust_env=False, headers=headers) as http,
    ):
        found = {}
        for route in ROUTES:
            path = route.path.format(model_id="fake")
            found[route.name] = (await http.request(route.client_method, path)).status_code
        return found


@pytest.mark.parametrize(
    ("keys", "given", "open_to"),
    [
        ({}, {}, ("open", "inference", "control")),
        ({"api_key": "k"}, {}, ("open",)),
        ({"api_key": "k"}, bearer("wrong"), ("open",)),
        ({"api_key": "k"}, {"Authorization": "Basic k"}, ("open",)),
        ({"api_key": "k"}, bearer("k"), ("open", "inference", "control")),
        ({"api_key": "k", "admin_api_key": "a"}, bearer("k"), ("open", "inference")),
        ({"api_key": "k", "admin_api_key": "a"}, bearer("a"), ("open", "inference", "control")),
        ({"admin_api_key": "a"}, {}, ("open", "inference")),
    ],
)
async def test_each_class_of_routes_needs_its_key(tmp_path, keys, given, open_to):
    found = await statuses(tmp_path, ServiceOptions(**keys), given)
    shut = {route.name for route in ROUTES if found[route.name] in (401, 403)}
    assert shut == {route.name for route in ROUTES if route.access not in open_to}


async def test_the_refusals_say_which_key_is_missing(tmp_path):
    options = ServiceOptions(api_key="k", admin_api_key="a")
    async with served(FakeCore(), tmp_path, options=options) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            nobody = await http.post("/generate", json=ONE)
            assert (nobody.status_code, "Unauthorized" in nobody.text) == (401, True)
            plain = await http.post("/pause_generation", json={"mode": "abort"}, headers=bearer("k"))
            assert (plain.status_code, "Forbidden" in plain.text) == (403, True)
            info = await http.get("/server_info", headers=bearer("k"))
            assert '"a"' not in info.text and '"k"' not in info.text
        async with EngineClient(url, api_key="a") as client:
            assert len(await client.generate(_body())) == 1
            await client.pause_generation("abort")
            await client.continue_generation()
        async with EngineClient(url) as stranger:
            with pytest.raises(EngineRejected, match="Unauthorized"):
                await stranger.generate(_body())


def _body():
    from zerogap.wire.api import GenerateBody  # noqa: PLC0415

    return GenerateBody.model_validate(ONE)


def test_keys_come_from_the_environment_and_never_into_words():
    keys = keys_from_environment({"ZEROGAP_API_KEY": "secret", "ZEROGAP_ADMIN_API_KEY": ""})
    assert keys == {"api_key": "secret", "admin_api_key": None}
    assert "secret" not in repr(ServiceOptions(**keys))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_e15_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(ConfigError, match="ZEROGAP_API_KEY"):
        bind(host, 0)


def test_with_a_key_every_address_may_be_bound():
    with bind("0.0.0.0", 0, guarded=True) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


async def test_more_responses_than_the_server_holds_are_told_to_come_back(tmp_path):
    core = FakeCore(step_seconds=0.05)
    async with (
        served(core, tmp_path, options=ServiceOptions(max_live_requests=3)) as url,
        httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http,
    ):
        long = {"input_ids": [[5]] * 3, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
        running = asyncio.create_task(http.post("/generate", json=long))
        while core.status()["num_running"] + core.status()["num_waiting"] < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        full = await http.post("/generate", json=ONE)
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        assert (await running).status_code == 200
        assert (await http.post("/generate", json=ONE)).status_code == 200


async def test_folders_outside_of_the_roots_are_refused(tmp_path):
    inside, allowed, outside = (tmp_path / name for name in ("a/model", "b", "c"))
    for folder in (inside, allowed, outside):
        folder.mkdir(parents=True)
    (tmp_path / "a" / "link").symlink_to(outside)
    options = ServiceOptions(allowed_paths=(allowed,))
    async with (
        served(FakeCore(), inside, options=options) as url,
        httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http,
    ):
        for path, refused in (
            (inside, False), (tmp_path / "a" / "sibling", False), (allowed / "x", False),
            (outside, True), (tmp_path / "a" / "link", True), (inside / ".." / ".." / "c", True), ("/etc", True),
        ):  # fmt: skip
            reply = await http.post("/update_weights_from_disk", json={"model_path": str(path)})
            assert (reply.status_code == 403) is refused, (path, reply.text)
            if refused:
                assert str(allowed) in reply.json()["message"]


class _Bomb:
    def __reduce__(self):
        return (Path.touch, (Path(self.path),))

    def __init__(self, path: Path) -> None:
        self.path = str(path)


async def test_nothing_from_the_wire_is_ever_unpickled(tmp_path):
    fuse = tmp_path / "exploded"
    text = base64.b64encode(pickle.dumps(_Bomb(fuse))).decode()
    async with (
        served(FakeCore(), tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http,
    ):
        reply = await http.post("/update_weights_from_tensor", json={"serialized_named_tensors": [text]})
    assert reply.status_code == 400
    assert "unpickling executes code" in reply.json()["message"]
    assert not fuse.exists()
    pickle.loads(base64.b64decode(text))  # the bomb is a real one
    assert fuse.exists()


def test_the_source_unpickles_nothing():
    root = Path(__file__).parents[2] / "src"
    words = ("pickle.load", "torch.load(", "cloudpickle", "dill.", "marshal.load", "yaml.load")
    found = [(p.name, w) for p in root.rglob("*.py") for w in words if w in p.read_text(encoding="utf-8")]
    assert found == []
