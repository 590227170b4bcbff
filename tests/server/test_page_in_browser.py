"""The page at ``/`` in a headless Chromium, over an engine whose answers the test gives."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from jaxinfer.server.http.errors import ApiError
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = sync_api.expect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.nightly,  # 20 s
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on PATH"),
]
KEY = "open sesame"
ANSWER = "Pages are **small**:\n\n- one\n- two\n\n```python\nx = 1 < 2\n```"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


class Scripted(NamedTuple):
    """A server, and the device that gives its answers."""

    server: Serving
    device: ScriptedDevice


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    engine, device = scripted_engine("qwen3")
    with serving(engine, served_model_name=("one", "two")) as server:
        yield Scripted(server, device)
        server.wait_until_idle()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    expect.set_options(
        timeout=20_000
    )  # milliseconds: the default 5,000 is short for a busy machine
    with sync_api.sync_playwright() as playwright:
        flags = ["--no-sandbox"]  # which does not work for root in a container
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield launched
        launched.close()


class Tab:
    """A page, the bodies of its requests, and what the browser reports."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.bodies: list[Any] = []
        self.reports: list[str] = []
        self.url = url
        self.page.on("request", self._note)
        self.page.on("pageerror", lambda error: self.reports.append(str(error)))
        self.page.on("console", lambda message: self.reports.append(message.text))
        self.page.goto(url)

    def _note(self, request: Any) -> None:
        if not request.url.startswith(f"{self.url}/"):
            self.reports.append(f"a request to {request.url}")
        if request.post_data:
            self.bodies.append(json.loads(request.post_data))

    def __getitem__(self, selector: str) -> Any:
        return self.page.locator(selector)

    def ready(self) -> Tab:
        """Itself, once the server has answered."""
        expect(self["#status"]).to_have_class("ready")
        return self

    def send(self, text: str) -> Tab:
        """Write a text and press Enter."""
        self["#draft"].fill(text)
        self["#draft"].press("Enter")
        return self

    def set(self, **values: str) -> Tab:
        """Enter settings, which may be folded away."""
        for name, value in values.items():
            field = self[f"#set-{name}"]
            group = self["details.group:not([open])"].filter(has=field)
            if group.count():
                group.locator("summary").click()
            field.select_option(value) if name == "logprobs" else field.fill(value)
        return self

    @property
    def answer(self) -> Any:
        """The last answer, which has ended."""
        expect(self["#send"]).to_be_visible()
        return self[".turn.assistant, .turn.completion"].last


@pytest.fixture
def tab(browser: Any, scripted: Scripted) -> Iterator[Tab]:
    opened = Tab(browser, scripted.server.url)
    yield opened.ready()
    opened.context.close()
    assert opened.reports == []


@pytest.fixture
def says(scripted: Scripted) -> Callable[[str], None]:
    return scripted.device.speak


def test_an_answer_as_it_is_written(tab: Tab, scripted: Scripted) -> None:
    scripted.device.speak(f"<think>\nLet me see.\n</think>\n\n{ANSWER}")
    with scripted.device.held(after=50) as release:
        tab.send("What are pages?")
        expect(tab[".turn.user .body"]).to_have_text("What are pages?")
        expect(tab[".turn.assistant .body"]).to_contain_text(re.compile("^Pages are"))
        expect(tab["#stop"]).to_be_visible()
        expect(tab[".thinking[hidden]"]).to_have_count(1)  # the question's
        release.set()
        answer = tab.answer
    expect(answer.locator("strong")).to_have_text("small")
    expect(answer.locator("li")).to_have_text(["one", "two"])
    expect(answer.locator("pre")).to_have_text("x = 1 < 2")
    expect(answer.locator(".facts")).to_contain_text(re.compile(r"^\d+ tokens · .* tokens/s"))
    thoughts = answer.locator(".thinking")
    expect(thoughts.locator("summary")).to_contain_text("Thought for")
    expect(thoughts.locator(".text")).not_to_be_visible()
    thoughts.locator("summary").click()
    expect(thoughts.locator(".text")).to_have_text("Let me see.")
    expect(tab["#rate"]).not_to_have_text("–")
    expect(tab["#running"]).to_have_text("0")


def test_logprobs_of_a_token(tab: Tab, says: Callable[[str], None]) -> None:
    says("blue\nsky")
    tab.set(logprobs="5").send("Colour?")
    tokens = tab.answer.locator(".token")
    expect(tokens).to_have_text([*"blue", "", *"sky", "<|eos|>"])
    expect(tokens.nth(4)).to_have_class("token line")
    tokens.nth(1).hover()
    expect(tab["#card .chosen code"]).to_have_text("l")
    expect(tab["#card .token-head"]).to_contain_text("36.8 %logprob −1.000")
    expect(tab["#card .alternatives > *"]).to_have_count(5)
    tab["#draft"].hover()
    expect(tab["#card"]).not_to_be_visible()
    tokens.first.focus()
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("Enter")
    tab["#draft"].hover()
    expect(tab["#card .chosen code"]).to_have_text("l")  # it stays
    tab.page.keyboard.press("Escape")
    expect(tab["#card"]).not_to_be_visible()
    tokens.nth(2).click()
    says("!")
    tab["#card .alternatives button"].first.click()
    expect(tab.answer.locator(".token")).to_have_count(5)  # two, the other one, ! and the end
    assert tab.bodies[-1]["messages"][-1] == {"role": "assistant", "content": "bl\0"}
    assert tab.bodies[-1]["continue_final_message"] is True
    tab.answer.get_by_text("Show text").click()
    expect(tab.answer.locator(".body")).to_have_text("bl\0!")


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop(tab: Tab, scripted: Scripted, how: str) -> None:
    scripted.device.speak("word " * 100)
    with scripted.device.held(after=20) as release:
        tab.send("Go")
        expect(tab[".turn.assistant .body"]).to_contain_text("word word")
        tab["#stop"].click() if how == "button" else tab.page.keyboard.press("Escape")
        expect(tab.answer.locator(".facts")).to_contain_text("stopped")
        release.set()
    scripted.server.wait_until_idle()  # long before all words
    scripted.device.speak("the end")
    tab.answer.get_by_text("Go on").click()
    expect(tab.answer.locator(".body")).to_contain_text(re.compile("^word word.*the end$"))


def test_edit_and_retry(tab: Tab, says: Callable[[str], None]) -> None:
    says("first")
    tab.set(system="Be brief.", temperature="0.5", stop="\\n\\n").send("one")
    expect(tab.answer.locator(".body")).to_have_text("first")
    says("second")
    tab.send("two")
    expect(tab.answer.locator(".body")).to_have_text("second")
    assert [one["content"] for one in tab.bodies[-1]["messages"]] == [
        "Be brief.",
        *("one", "first", "two"),
    ]
    assert (tab.bodies[-1]["temperature"], tab.bodies[-1]["stop"]) == (0.5, ["\n\n"])
    says("third")
    tab["#draft"].press("ArrowUp")
    tab[".editor textarea"].fill("zwei")
    tab[".editor textarea"].press("Enter")
    expect(tab.answer.locator(".body")).to_have_text("third")
    tab[".turn.user"].first.hover()
    tab[".turn.user"].first.get_by_text("Edit").click()
    says("fourth")
    tab[".editor textarea"].fill("eins")
    tab[".editor"].get_by_text("Send").click()
    expect(tab.answer.locator(".body")).to_have_text("fourth")
    assert [one["content"] for one in tab.bodies[-1]["messages"]] == ["Be brief.", "eins"]
    says("fifth")
    tab.answer.get_by_text("Retry").click()
    expect(tab.answer.locator(".body")).to_have_text("fifth")
    expect(tab[".turn"]).to_have_count(2)
    tab.page.reload()
    expect(tab[".turn .body"]).to_have_text(["eins", "fifth"])
    tab["#new"].click()
    expect(tab[".turn"]).to_have_count(0)
    tab["#undo"].click()
    expect(tab[".turn .body"]).to_have_text(["eins", "fifth"])


def test_tool_calls(tab: Tab, says: Callable[[str], None]) -> None:
    says('<tool_call>\n{"name": "weather", "arguments": {"city": "Bath"}}\n</tool_call>')
    tab.set(tools=json.dumps(TOOLS)).send("Rain?")
    call = tab.answer.locator(".calls figure")
    expect(call.locator("figcaption span")).to_have_text("Calls weather")
    expect(call.locator("pre")).to_have_text('{\n  "city": "Bath"\n}')
    says("No.")
    call.locator("textarea").fill('{"rain": false}')
    tab.page.get_by_text("Send the result").click()
    expect(tab.answer.locator(".body")).to_have_text("No.")
    question, called, result = tab.bodies[-1]["messages"]
    assert question["content"] == "Rain?"
    assert called["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "Bath"}',
    }
    assert result["tool_call_id"] == called["tool_calls"][0]["id"]
    assert (result["role"], result["content"]) == ("tool", '{"rain": false}')


def test_completions(tab: Tab, says: Callable[[str], None]) -> None:
    says(" 100 degrees")
    tab.page.get_by_text("Completion", exact=True).click()
    tab["#model"].select_option("two")
    tab.set(logprobs="5")["#draft"].fill("Water boils at")
    tab["#draft"].press("Enter")  # begins a line
    tab["#draft"].press("Backspace")
    tab["#draft"].press("Control+Enter")
    expect(tab.answer.locator(".token")).to_have_count(13)
    expect(tab[".turn.prompt .body"]).to_have_text("Water boils at")
    body = tab.bodies[-1]
    assert (body["prompt"], body["model"], body["logprobs"]) == ("Water boils at", "two", 5)
    says("!")
    tab.answer.locator(".token").nth(4).click()
    tab["#card .alternatives button"].first.click()
    expect(tab.answer.locator(".token")).to_have_count(4 + 1 + 2)  # before, another, ! and the end
    assert tab.bodies[-1]["prompt"] == "Water boils at 100\0"


def test_a_request_as_curl(tab: Tab) -> None:
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.set(temperature="0.5")["#draft"].fill("It's me")
    tab["#copy-request"].click()
    expect(tab["#copy-request"]).to_have_text("Copied")
    tab["#draft"].fill("")
    tab["#draft"].press("Control+V")
    command = shlex.split(tab["#draft"].input_value())
    assert command[:2] == ["curl", f"{tab.url}/v1/chat/completions"]
    body = json.loads(command[-1])
    assert body["messages"] == [{"role": "user", "content": "It's me"}]
    assert (body["model"], body["temperature"]) == ("one", 0.5)


def test_text_is_text(tab: Tab, says: Callable[[str], None]) -> None:
    hostile = (
        "<img src=x onerror=alert(1)><script>alert(2)</script> [a](javascript:alert(3)) "
        "![b](https://example.org/b.png) [c](https://example.org/c)"
    )
    for text in (hostile, f"- {hostile}\n\n| {hostile} | a |\n|---|---|\n| b | c |"):
        says(text)
        tab.send(hostile)
        expect(tab.answer).to_contain_text("<script>alert(2)</script>")
        expect(tab[".turn :is(img, script)"]).to_have_count(0)
        links = tab.answer.locator("a")
        assert {links.nth(index).get_attribute("href") for index in range(links.count())} == {
            "https://example.org/b.png",
            "https://example.org/c",
        }
    says("`" * 500 + "[" * 500 + "*_" * 500 + "\n\n" + "> " * 500 + "\n\n" + "- " * 500)
    tab.send("more")
    expect(tab.answer.locator(".facts")).to_contain_text("prompt")


def test_errors_in_words(tab: Tab, says: Callable[[str], None]) -> None:
    says("fine")
    tab.set(others="{").send("x")
    expect(tab.answer.locator(".error")).to_contain_text("Other fields is not JSON")
    expect(tab["#panel .wrong:visible"]).to_contain_text("Other fields is not JSON")
    tab.set(others='{"timeout": 50}', max_tokens="999999").send("x")
    expect(tab.answer.locator(".error")).to_contain_text("lower max_tokens to at most")
    assert tab.reports.pop().endswith("400 (Bad Request)")
    tab.set(max_tokens="").send("y")
    expect(tab.answer.locator(".body")).to_have_text("fine")
    assert [one["content"] for one in tab.bodies[-1]["messages"]] == ["x", "x", "y"]
    assert tab.bodies[-1]["timeout"] == 50
    tab.context.set_offline(True)
    tab.send("z")
    expect(tab.answer.locator(".error")).to_contain_text("cannot be reached")
    expect(tab["#status"]).to_have_class("away")
    tab.context.set_offline(False)
    tab.answer.get_by_text("Retry").click()
    expect(tab.answer.locator(".body")).to_have_text("fine")
    tab.ready()
    assert all("ERR_INTERNET_DISCONNECTED" in report for report in tab.reports)
    tab.reports.clear()


def test_a_server_that_loads_its_model(browser: Any, scripted: Scripted) -> None:
    tab = Tab(browser, scripted.server.url)
    body = ApiError(503, "the model is still being loaded", code="loading").body
    refuse = partial(sync_api.Route.fulfill, status=503, body=body)
    tab.page.route("**/metrics", lambda route: refuse(route))
    tab.page.reload()
    expect(tab["#status"]).to_have_class("loading")
    expect(tab["#status"]).to_have_attribute("title", "The model is still being loaded.")
    tab.page.unroute("**/metrics")
    tab.ready()
    expect(tab["#welcome-model"]).to_have_text("one")
    expect(tab["#welcome-context"]).to_have_text("Context of 8,192 tokens")
    tab.context.close()


def test_the_key(browser: Any) -> None:
    engine, device = scripted_engine("qwen3")
    device.speak("come in")
    with serving(engine, api_key=(KEY,)) as server:
        tab = Tab(browser, server.url)
        expect(tab["#key-dialog"]).to_be_visible()
        tab.page.keyboard.press("Escape")  # does not help
        tab["#key"].fill("wrong")
        tab["#key"].press("Enter")
        expect(tab["#key-wrong"]).to_have_text("The server does not accept this key.")
        tab["#key"].fill(KEY)
        tab["#key"].press("Enter")
        tab.ready().send("hello")
        expect(tab.answer.locator(".body")).to_have_text("come in")
        tab.page.reload()
        expect(tab[".turn .body"]).to_have_text(["hello", "come in"])
        tab.ready()
        kept = json.dumps(tab.context.storage_state())  # localStorage and cookies
        assert KEY not in kept and "wrong" not in kept
        other = tab.context.new_page()
        other.goto(server.url)
        expect(other.locator("#key-dialog")).to_be_visible()
        other.close()
        tab["#forget"].click()
        expect(tab["#key-dialog"]).to_be_visible()
        tab.context.close()
        assert all("401 (Unauthorized)" in report for report in tab.reports)
        server.wait_until_idle()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_telephone(browser: Any, scripted: Scripted, scheme: str) -> None:
    size = {"width": 360, "height": 640}
    tab = Tab(browser, scripted.server.url, viewport=size, color_scheme=scheme, has_touch=True)
    tab.ready()
    scripted.device.speak(f"{'long' * 60} {ANSWER}\n\n| {'wide | ' * 12}\n|{'---|' * 12}")
    expect(tab["#panel"]).not_to_be_visible()
    tab["#toggle-panel"].tap()
    tab.set(logprobs="5")
    tab["#close-panel"].tap()
    expect(tab["#panel"]).not_to_be_visible()
    tab["#draft"].fill("hello")
    tab["#send"].tap()
    tab.answer.locator(".token").first.tap()
    for selector in ("#send", "#card", "#status", "#ttft"):
        box = tab[selector].bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= size["width"]
    tab["#transcript"].tap(position={"x": 2, "y": 2})
    expect(tab["#card"]).not_to_be_visible()
    tab.answer.get_by_text("Show text").tap()
    for turn in tab[".turn"].all():
        assert turn.bounding_box()["width"] <= size["width"] - 28
    paper = "rgb(253, 253, 251)" if scheme == "light" else "rgb(22, 23, 21)"
    expect(tab["body"]).to_have_css("background-color", paper)
    tab["#theme"].tap()
    expect(tab["body"]).to_have_css("background-color", "rgb(253, 253, 251)")
    tab["#theme"].tap()
    expect(tab["body"]).to_have_css("background-color", "rgb(22, 23, 21)")
    tab.context.close()
    assert tab.reports == []
