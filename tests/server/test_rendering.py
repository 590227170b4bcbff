"""Chats are rendered in processes that end with a template that runs too long or takes too much."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from jaxinfer.core.errors import ContextLengthError, RequestError, TokenizerError
from jaxinfer.engine.link.spawn import Spawned, spawn
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.service import rendering
from jaxinfer.server.service.rendering import Renderer
from jaxinfer.text.render_process import RenderRequest
from kit.hostile_templates import LARGE, MANY_LARGE, MANY_SLOW, SLOW
from kit.raw_http import RawClient, Reply, get, post
from kit.server import LocalRenderer, serving
from kit.server_process import SIM_SERVE, gone, server_process, sim_arguments, wait_until
from kit.watched_executor import watched_engine

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
PLAIN = "{{ messages[0].content }}"
ENDLESS = SLOW["squares"]


def program(**constants: float) -> tuple[str, ...]:
    """The program of a renderer's process with other limits."""
    changes = "".join(f"it.{name} = {value}; " for name, value in constants.items())
    code = f"from jaxinfer.text import render_process as it; {changes}it.main()"
    return (sys.executable, "-c", code)


def request(template: str, messages: Any = (USER,), **more: Any) -> RenderRequest:
    return RenderRequest(template, messages, 1 << 22, **more)


def rendered(use: Callable[[Renderer], Any], **constants: float) -> Any:
    """The result of a coroutine that uses a renderer."""

    async def main() -> Any:
        renderer = Renderer(program(**constants))
        try:
            return await use(renderer)
        finally:
            await renderer.close()

    return asyncio.run(main())


def refusals(templates: dict[str, str], max_seconds: float = 2.0, **constants: float) -> list[str]:
    """The errors of these templates, one after another, with a chat that succeeds after each."""

    async def use(renderer: Renderer) -> list[str]:
        found: list[str] = []
        for name, template in templates.items():
            with pytest.raises(TokenizerError) as failure:
                await renderer.render(request(template, max_seconds=max_seconds), is_own=False)
            found.append(f"{name}: {failure.value}")
            assert await renderer.render(request(PLAIN), is_own=False) == "hi"
        return found

    return rendered(use, **constants)


def test_a_template_that_runs_too_long_ends_alone() -> None:
    assert all("takes more than 0.2 s" in one for one in refusals(SLOW, 0.2))


def test_a_template_without_cpu_time_ends_alone() -> None:
    found = refusals({"squares": ENDLESS}, WALL_TIMES=0.25)
    assert "takes more than 30 s" in found[0]


def test_limits_hold_whatever_signals_the_caller_blocks() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF, signal.SIGALRM})
    try:
        found = refusals({"squares": ENDLESS}, 0.2)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "takes more than 0.2 s" in found[0]


def test_a_template_that_takes_too_much_memory_ends_alone() -> None:
    assert all("needs too much memory" in one for one in refusals(LARGE))


@pytest.mark.nightly
def test_every_means_of_jinja() -> None:
    slow, large = refusals(MANY_SLOW), refusals(MANY_LARGE)
    assert [one for one in slow if "takes more than 2 s" not in one] == []
    expected = ("needs too much memory", "takes more than 2 s", "a product or power")
    assert [one for one in large if not any(words in one for words in expected)] == []


def test_the_prompt_and_errors_equal_those_of_this_process() -> None:
    async def use(renderer: Renderer) -> None:
        source = "{{ bos_token }}{{ tools|length }}{{ messages[0].content }}{{ n }}"
        more = {"special_tokens": {"bos_token": "<s>"}, "variables": {"tools": [{}], "n": 10**30}}
        text = await renderer.render(request(source, **more), is_own=True)
        assert text == f"<s>1hi{10**30}"
        with pytest.raises(RequestError, match=r"messages\[0\].role must be a string"):
            await renderer.render(request(PLAIN, ({"role": 1},)), is_own=True)
        with pytest.raises(TokenizerError, match="failed: no user"):
            await renderer.render(request("{{ raise_exception('no user') }}"), is_own=True)
        with pytest.raises(TokenizerError, match="gives no UTF-8"):
            await renderer.render(request("{{ '\\ud800' }}"), is_own=True)
        with pytest.raises(ContextLengthError, match="more than 4194304 characters"):
            long = ({**USER, "content": "x" * (1 << 23)},)
            await renderer.render(request(PLAIN, long), is_own=True)

    rendered(use)


@pytest.mark.parametrize("kept", [1, 1 << 40], ids=["a process each", "one process"])
def test_many_chats_at_once(kept: int) -> None:
    """A process that has had too much memory is replaced, and no chat is lost."""

    async def use(renderer: Renderer) -> list[str]:
        chats = [request(PLAIN, ({**USER, "content": f"{n}"},)) for n in range(6)]
        return await asyncio.gather(*(renderer.render(one, is_own=True) for one in chats))

    assert rendered(use, KEPT_MEMORY=kept) == [f"{n}" for n in range(6)]


def own_chat(port: int, **fields: Any) -> Reply:
    return post(port, CHAT, messages=[USER], max_tokens=2, **fields)


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[Spawned]:
    """The processes that are started."""
    found: list[Spawned] = []

    def noting(program: Sequence[str]) -> Spawned:
        found.append(spawn(program))
        return found[-1]

    monkeypatch.setattr(rendering, "spawn", noting)
    return found


def test_everything_else_is_answered_while_a_template_runs() -> None:
    with (
        serving(
            watched_engine()[0],
            renderer=Renderer(),
            trust_request_chat_template=True,
            max_template_seconds=1.5,
        ) as server,
        RawClient(server.port) as hostile,
    ):
        for fields in ({}, {"chat_template": PLAIN}):  # both processes run, the engine is warm
            assert own_chat(server.port, **fields).status == 200
        hostile.post(CHAT, messages=[USER], chat_template=ENDLESS)
        for path in ("/health", "/ready", "/metrics"):
            assert get(server.port, path).status == 200
        assert own_chat(server.port).status == 200
        assert post(server.port, "/tokenize", messages=[USER]).status == 200
        assert not hostile.has_reply
        failed = hostile.reply()
        assert failed.status == 400 and "takes more than" in failed.error["message"]


@pytest.mark.parametrize("trusts", [False, True])
def test_an_empty_template_is_as_absent(trusts: bool) -> None:
    engine, renderer = watched_engine()[0], LocalRenderer()
    flags: dict[str, Any] = {"chat_template": PLAIN, "trust_request_chat_template": trusts}
    with serving(engine, renderer=renderer, **flags) as server:
        for fields in ({}, {"chat_template": ""}):
            answer = server.post("/tokenize", messages=[USER], **fields)
            assert answer.status_code == 200 and answer.json()["count"] == len(USER["content"])
            answer = server.post(CHAT, messages=[USER], max_tokens=2, **fields)
            assert answer.json()["usage"]["prompt_tokens"] == len(USER["content"])


def test_chats_whose_clients_have_left_are_not_rendered(
    monkeypatch: pytest.MonkeyPatch, spawned: list[Spawned]
) -> None:
    monkeypatch.setattr(rendering, "MAX_WAITING", 4)
    renderer = Renderer()
    with (
        serving(
            watched_engine()[0],
            renderer=renderer,
            trust_request_chat_template=True,
            max_template_seconds=0.5,
        ) as server,
        ExitStack() as stack,
    ):
        hostile = [stack.enter_context(RawClient(server.port)) for _ in range(4)]
        for client in hostile:
            client.post(CHAT, messages=[USER], chat_template=ENDLESS)
        wait_until(lambda: renderer.num_waiting == 4, "the queue is full")
        refused = own_chat(server.port, chat_template=PLAIN)
        assert refused.status == 429 and refused.headers["retry-after"] == "2"
        assert refused.error["param"] == "chat_template"
        for client in hostile:
            client.disconnect()
        wait_until(lambda: renderer.num_waiting < 4, "one has ended")
        assert own_chat(server.port, chat_template=PLAIN).status == 200
        assert len(spawned) == 2  # for the one that had begun, and for the last


# of one query for a score, and a prompt for others
LOOPS_FOR_A_QUERY = f"{{% if messages[0].content == 'loop' %}}{ENDLESS}{{% endif %}}hi"
SCORES: dict[str, dict[str, Any]] = {
    "/score": {"text_1": "loop", "text_2": ["a", "b"]},
    "/rerank": {"query": "loop", "documents": ["a", "b"]},
}


def scoring_engine() -> Engine:
    engine, _ = watched_engine()
    engine.facts = replace(engine.facts, score_token_ids=(3, 4))
    return engine


@pytest.mark.parametrize("path", SCORES)
def test_other_routes_do_not_wait_for_the_template_of_scores(path: str) -> None:
    """Also those that use a thread, for a long body or prompt: a score that waits holds none."""
    with (
        serving(
            scoring_engine(),
            renderer=Renderer(),
            chat_template=LOOPS_FOR_A_QUERY,
            max_template_seconds=1.5,
        ) as server,
        ExitStack() as stack,
    ):
        assert own_chat(server.port).status == 200
        hostile = [stack.enter_context(RawClient(server.port)) for _ in range(40)]
        for client in hostile:
            client.post(path, **SCORES[path])
        assert post(server.port, "/tokenize", prompt="a " * 1500).status == 200
        assert get(server.port, "/health").status == 200
        assert not any(client.has_reply for client in hostile)
        failed = hostile[0].reply()
        assert failed.status == 400 and "takes more than" in failed.error["message"]


class _SlowRenderer(LocalRenderer):
    num_begun = 0

    async def render(self, request: RenderRequest, *, is_own: bool, client: str = "") -> str:
        self.num_begun += 1
        await asyncio.sleep(0.02)
        return await super().render(request, is_own=is_own, client=client)


def test_scores_whose_client_has_left_are_not_rendered() -> None:
    renderer = _SlowRenderer()
    with (
        serving(scoring_engine(), renderer=renderer, chat_template="hi") as server,
        RawClient(server.port) as client,
    ):
        tasks = server.num_tasks()
        client.post("/rerank", query="a", documents=["b"] * 500)
        wait_until(lambda: renderer.num_begun > 1, "it is rendered")
        client.disconnect()
        wait_until(lambda: server.num_tasks() <= tasks, "the request has ended")
        assert renderer.num_begun < 500


def test_clients_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the server's template: of long chats a process has one at a time."""
    monkeypatch.setattr(rendering, "MAX_SENT_BYTES", 1)

    async def use(renderer: Renderer) -> list[str]:
        ended: list[str] = []

        async def chat(client: str) -> None:
            await renderer.render(request(PLAIN), is_own=True, client=client)
            ended.append(client)

        await asyncio.gather(*map(chat, ("many", "many", "many", "many", "one", "other")))
        return ended

    assert rendered(use) == ["many", "one", "other", "many", "many", "many"]


def test_the_bytes_of_waiting_chats_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_WAITING_BYTES", 1000)

    async def use(renderer: Renderer) -> None:
        large = request(PLAIN, ({**USER, "content": "x" * 1000},))
        alone = asyncio.create_task(renderer.render(large, is_own=True))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="1 chats wait for their prompts") as refused:
            await renderer.render(request(PLAIN), is_own=True)
        assert refused.value.status == 429 and refused.value.code == "queue_full"
        assert await alone == "x" * 1000
        left = asyncio.create_task(renderer.render(large, is_own=True))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait((left,))
        assert await renderer.render(request(PLAIN), is_own=True) == "hi"

    rendered(use)


def test_chats_end_if_their_process_is_killed_and_no_other_can_start(
    spawned: list[Spawned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory is used up: it is not the chat's fault, and none waits for ever."""

    def refused(program: Sequence[str]) -> Spawned:
        raise OSError("cannot allocate memory")

    async def use(renderer: Renderer) -> None:
        chats = [renderer.render(request(ENDLESS), is_own=False) for _ in range(3)]
        waiting = [asyncio.create_task(chat) for chat in chats]
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(rendering, "spawn", refused)
            spawned[0].process.kill()
            async with asyncio.timeout(20):
                ended = await asyncio.gather(*waiting, return_exceptions=True)
                ended += await asyncio.gather(
                    renderer.render(request(PLAIN), is_own=False), return_exceptions=True
                )
        assert [(type(one), getattr(one, "status", 0)) for one in ended] == [(ApiError, 503)] * 4
        assert await renderer.render(request(PLAIN), is_own=False) == "hi"

    rendered(use)


def test_a_signal_ends_a_server_whose_template_runs() -> None:
    command = (*SIM_SERVE, *sim_arguments(0.0), "--trust-request-chat-template")
    with server_process(*command) as server, RawClient(server.port) as hostile:
        hostile.post(CHAT, messages=[USER], chat_template=ENDLESS)
        wait_until(lambda: len(server.children) == 3, "it is rendered")
        children = server.children
        server.signal(signal.SIGTERM)
        assert server.exit_code(8.0) == 0
        wait_until(lambda: all(map(gone, children)), "nothing is left")
