"""What the chat page keeps and shows, with a scripted model: branches, reloads, files, hostile answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.browsing import PHONE, axe_findings, needs_axe, needs_chromium, problems_of, until
from tests.e2e.chatting import ScriptedModel, act, ask, open_chat, said, set_fields, settle, texts
from tests.e2e.conftest import Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d4944415478da63f8ffff3f000"
    "5fe02fea72d8e4d0000000049454e44ae426082"
)
FORMAT = "stemma-conversations"
RICH = """# Title
Some **bold** and `code`, [a link](https://example.org/a_(b)), a list:

1. one
   - inner
2. two

```python
def f(x):  # a comment
    return "text"
```

| left | right |
|---|--:|
| 1 | 2 |

> quoted
"""
HOSTILE = """<script>window.harmed = 1</script><img src=x onerror="window.harmed = 1">

[press](javascript:window.harmed=1) [data](data:text/html,hi) [ok](https://example.org) ![p](https://example.org/p.png)

[<b onclick=x>](jAvAsCrIpT:alert(1)) `<i>` **<u>**

```html"><script>window.harmed = 1</script>
</code></pre><script>window.harmed = 1</script>
```
"""


def test_an_answer_is_shown_as_markdown_and_its_code_copied(page: Page, served: Served) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=served.url)
    ScriptedModel(page, said(RICH))
    open_chat(page, served.url)
    ask(page, "Show me all")
    assert texts(page, ".answer h3") == ["Title"]
    assert texts(page, ".answer ol > li > ul > li") == ["inner"]
    assert texts(page, ".answer td") == ["1", "2"]
    link = page.locator(".answer a")
    assert link.get_attribute("href") == "https://example.org/a_(b)"
    assert "noopener" in (link.get_attribute("rel") or "")
    assert texts(page, ".answer .code-keyword") == ["def", "return"]
    page.locator(".code button").click()
    until(page, "document.querySelector('.code button').textContent === 'Copied'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == 'def f(x):  # a comment\n    return "text"'
    assert problems_of(page) == []


def test_a_hostile_answer_is_text(page: Page, served: Served) -> None:
    endless = (
        ">" * 20_000 + "\n\n" + "\n".join(" " * 2 * depth + "- x" for depth in range(300)) + "[" * 20_000
    )
    model = ScriptedModel(page, said(HOSTILE), said(endless), said("**a" * 20_000))
    open_chat(page, served.url)
    ask(page, "Harm me")
    assert page.evaluate("window.harmed") is None
    assert page.locator(".answer :is(script, img, iframe, object, u, i, b)").count() == 0
    links = page.evaluate("[...document.querySelectorAll('.answer a')].map((a) => a.href)")
    assert links == ["https://example.org/", "https://example.org/p.png"]
    names = "[...document.querySelectorAll('#turns *')].flatMap((e) => e.getAttributeNames())"
    assert [name for name in page.evaluate(names) if name.startswith("on")] == []
    ask(page, "Nest")
    ask(page, "Begin")
    depth = "(function deep(e) { return 1 + Math.max(0, ...[...e.children].map(deep)); })"
    assert page.evaluate(f"{depth}(document.getElementById('turns'))") < 60
    assert model.replies == []
    assert problems_of(page) == []


def test_markdown_that_grows_ends_as_markdown_at_once(page: Page, served: Served) -> None:
    open_chat(page, served.url)
    grown = """async (text) => {
      const { Markdown } = await import("/chat/markdown.js");
      const show = (texts) => {
        const place = document.createElement("div"), made = new Markdown(place);
        for (const one of texts) made.show(one);
        return place.innerHTML;
      };
      const whole = show([text]);
      return [1, 2, 3, 7, 31].every((step) => {
        const cuts = [];
        for (let end = step; end < text.length; end += step) cuts.push(text.slice(0, end));
        return show([...cuts, text]) === whole;
      });
    }"""
    assert page.evaluate(grown, RICH + HOSTILE + RICH)


def test_questions_are_edited_and_answers_made_again_as_branches(page: Page, served: Served) -> None:
    replies = ("one", "two", "to b", "three", "four")
    model = ScriptedModel(page, *(said(text) for text in replies))
    open_chat(page, served.url)
    ask(page, "a")
    act(page, "Regenerate")
    settle(page)
    assert (texts(page, ".answer"), texts(page, ".branches span")) == (["two"], ["2/2"])
    act(page, "The branch before")
    until(page, "document.querySelector('.answer').textContent === 'one'")
    ask(page, "b")
    assert model.contents() == ["a", "one", "b"]
    act(page, "Edit", turn=0)
    page.fill(".edit textarea", "a, but better")
    page.click(".edit button")
    settle(page)
    assert model.contents() == ["a, but better"]
    assert texts(page, ".answer") == ["three"]
    act(page, "The branch before", turn=0)
    until(page, "document.querySelectorAll('.question').length === 2")
    assert texts(page, ".answer") == ["one", "to b"]
    page.once("dialog", lambda dialog: dialog.accept())
    act(page, "Delete from here on", turn=2)
    until(page, "document.querySelectorAll('.question').length === 1")
    assert texts(page, ".branches span") == ["1/2", "1/2"]
    assert problems_of(page) == []


def test_a_reload_keeps_all(page: Page, served: Served) -> None:
    model = ScriptedModel(page, said("one"), said("two"), said("three"))
    open_chat(page, served.url)
    set_fields(page, system="Be brief.", temperature="0.5")
    ask(page, "first")
    page.click("#again")
    ask(page, "second")
    page.fill("#question", "not sent yet")
    page.reload()
    until(page, "document.getElementById('model').textContent === 'tiny'")
    assert page.input_value("#question") == "not sent yet"
    assert page.input_value("#temperature") == "0.5"
    assert texts(page, ".answer") == ["two"]
    assert "4 from host" in texts(page, ".reuse")[0]
    page.get_by_role("link", name="first").click()
    until(page, "document.querySelector('.answer').textContent === 'one'")
    assert page.input_value("#question") == ""
    ask(page, "again")
    assert model.contents() == ["Be brief.", "first", "one", "again"]
    assert model.sent[-1]["temperature"] == 0.5
    page.click("#again")
    page.fill("#question", "new and not sent")
    page.reload()
    until(page, "document.getElementById('question').value === 'new and not sent'")


@pytest.mark.slow
def test_conversations_are_renamed_found_and_deleted(page: Page, served: Served) -> None:
    ScriptedModel(page, said("one"), said("two"))
    open_chat(page, served.url)
    ask(page, "first")
    page.click("#again")
    ask(page, "second")
    page.once("dialog", lambda dialog: dialog.accept("my second"))
    page.click("#conversations li:first-child summary")
    page.get_by_role("button", name="Rename").click()
    page.get_by_role("link", name="my second").wait_for()
    page.fill("#find", "FIRST")
    assert page.locator("#conversations li:visible").count() == 1
    page.fill("#find", "")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#conversations li:first-child summary")
    page.get_by_role("button", name="Delete", exact=True).click()
    until(page, "document.querySelectorAll('#conversations li').length === 1")
    assert page.locator("#turns > li").count() == 0
    assert texts(page, "#conversations a") == ["first"]


def test_export_and_import(page: Page, served: Served, tmp_path: Path) -> None:
    ScriptedModel(page, said("one"), said("two"))
    open_chat(page, served.url)
    ask(page, "first")
    act(page, "Regenerate")
    settle(page)
    with page.expect_download() as download:
        page.click("#export")
    saved = tmp_path / "saved.json"
    download.value.save_as(saved)
    page.set_input_files("#import-file", saved)
    until(page, "document.querySelectorAll('#conversations li').length === 2")
    until(page, "document.getElementById('state').textContent === '1 conversation imported'")
    assert (texts(page, ".answer"), texts(page, ".branches span")) == (["two"], ["2/2"])
    assert problems_of(page) == []


def message(name: str, parent: str | None, **fields: Any) -> dict[str, Any]:
    return {"id": name, "parent": parent, "role": "user", "text": name, **fields}


def test_a_file_that_is_no_export_is_refused(page: Page, served: Served) -> None:
    open_chat(page, served.url)
    foreign = json.dumps({"format": FORMAT, "conversations": [{"messages": [{"id": "a", "role": "x"}]}]})
    for content, told in (("{", "can't be imported"), ("[1]", "neither an export"), (foreign, "role")):
        file: Any = {"name": "x.json", "mimeType": "application/json", "buffer": content.encode()}
        page.set_input_files("#import-file", file)
        until(page, f"document.getElementById('state').textContent.includes({json.dumps(told)})")
    assert page.locator("#conversations li").count() == 0


def import_all(page: Page, found: object) -> None:
    file = json.dumps(found).encode()
    page.set_input_files("#import-file", {"name": "x.json", "mimeType": "application/json", "buffer": file})
    until(page, "document.getElementById('state').textContent.includes('imported')")


@pytest.mark.slow
def test_of_a_hostile_file_only_what_is_sound_is_taken(page: Page, served: Served) -> None:
    open_chat(page, served.url)
    messages = [
        message("a", None, images=["javascript:1", "https://example.org/track.png"]),
        message("round", "trip"),
        message("trip", "round"),
        message("lost", "nowhere"),
    ]
    import_all(page, {"format": FORMAT, "conversations": [{"messages": messages, "leaf": "trip"}]})
    assert texts(page, ".question") == ["a"]
    assert page.locator("#turns img").count() == 0


@pytest.mark.slow
def test_what_llama_cpps_page_exported_is_taken(page: Page, served: Served) -> None:
    open_chat(page, served.url)
    turns = [
        ("root", "", "root"),
        ("s", "Be kind.", "system"),
        ("q", "Hello?", "user"),
        ("a", "Hi.", "assistant"),
    ]
    messages = [
        {
            "id": name,
            "parent": before,
            "role": role,
            "content": text,
            "type": "root" if name == "root" else "text",
        }
        for (name, text, role), before in zip(turns, [None, "root", "s", "q"], strict=True)
    ]
    import_all(page, [{"conv": {"id": "c", "name": "Theirs", "currNode": "a"}, "messages": messages}])
    assert (texts(page, ".question"), texts(page, ".answer")) == (["Hello?"], ["Hi."])
    assert page.input_value("#system") == "Be kind."
    assert texts(page, "#conversations a") == ["Theirs"]


WATCH = """() => {
  const list = document.getElementById("turns"), known = new Set(list.children);
  window.made = [];
  new MutationObserver((records) => {
    for (const { target, addedNodes } of records)
      if (target === list || known.has(target.closest("#turns > li")))
        made.push(...[...addedNodes].map((node) => node.nodeName));
  }).observe(list, { childList: true, subtree: true });
}"""
"""Notes nodes that are made in the list, or in a row that was there before."""


def test_of_a_hundred_turns_only_new_ones_are_made(page: Page, served: Served) -> None:
    open_chat(page, served.url)
    messages = [
        message(f"m{i}", f"m{i - 1}" if i else None, role="assistant" if i % 2 else "user", text=RICH)
        for i in range(200)
    ]
    import_all(page, {"format": FORMAT, "conversations": [{"title": "long", "messages": messages}]})
    until(page, "document.querySelectorAll('#turns > li').length === 200")
    ScriptedModel(page, said("new"))
    page.evaluate(WATCH)
    ask(page, "one more")
    assert page.locator("#turns > li").count() == 202
    assert page.evaluate("made") == ["LI", "LI"]
    assert problems_of(page) == []


@pytest.mark.slow
def test_reasoning_is_folded_and_calls_are_answered(page: Page, served: Served) -> None:
    call = {"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    model = ScriptedModel(
        page, ({"reasoning_content": "Hm.", "tool_calls": [call]}, "tool_calls"), said("Sunny.")
    )
    open_chat(page, served.url)
    tool = {"type": "function", "function": {"name": "weather"}}
    set_fields(page, extra=json.dumps({"tools": [tool]}))
    ask(page, "Weather?")
    assert model.sent[0]["tools"] == [tool]
    assert not page.is_visible(".reasoning")
    page.click(".thought summary")
    assert texts(page, ".reasoning") == ["Hm."]
    assert texts(page, ".call summary") == ["Call of weather"]
    page.fill(".call textarea", "20 degrees")
    page.click(".calls > button")
    settle(page)
    assert model.sent[1]["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "call-1",
        "content": "20 degrees",
    }
    assert model.sent[1]["messages"][-2]["tool_calls"][0]["function"]["name"] == "weather"
    assert texts(page, ".answer")[-1] == "Sunny."


def test_a_wrong_setting_is_named_and_the_question_kept(page: Page, served: Served) -> None:
    open_chat(page, served.url)
    set_fields(page, extra="[1]")
    ask(page, "Hello?")
    assert "JSON object" in (page.text_content("#state") or "")
    assert page.input_value("#question") == "Hello?"
    assert page.locator("#turns > li").count() == 0


PASTE = """() => {
  const data = new DataTransfer(), all = { clipboardData: data, bubbles: true };
  data.items.add(new File(["x = 1"], "x.py", { type: "text/x-python" }));
  document.getElementById("question").dispatchEvent(new ClipboardEvent("paste", all));
}"""


def picture() -> Any:
    return {"name": "dot.png", "mimeType": "image/png", "buffer": PIXEL}


@pytest.mark.slow
def test_pictures_go_only_to_a_model_that_takes_them(page: Page, served: Served) -> None:
    open_chat(page, served.url)
    page.set_input_files("#file", picture())
    until(page, "document.getElementById('state').textContent === 'this model takes no pictures'")
    card = {"id": "seer", "state": "loaded", "input_modalities": ["text", "image"]}
    page.route(
        "**/v1/models", lambda route: route.fulfill(json={"data": [card, {"id": "other", "state": "asleep"}]})
    )
    model = ScriptedModel(page, said("A dot."))
    page.reload()
    until(page, "document.getElementById('model').textContent === 'seer'")
    assert texts(page, "#which option") == ["seer (loaded)", "other (asleep)"]
    page.set_input_files("#file", picture())
    page.locator("#attached img").wait_for()
    page.evaluate(PASTE)
    until(page, "document.getElementById('question').value.includes('x = 1')")
    page.click("#send")
    settle(page)
    image, text = model.contents()[0]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert "x.py:" in text["text"]
    assert page.locator(".turn.user img").count() == 1
    assert problems_of(page) == []


@needs_axe
@pytest.mark.parametrize(
    ("scheme", "is_phone"),
    [
        ("dark", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("dark", False), ("light", True))),
        pytest.param("light", False, marks=pytest.mark.slow),
    ],
)
def test_axe_finds_nothing(page: Page, served: Served, scheme: Any, is_phone: bool) -> None:
    if is_phone:
        page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme=scheme)
    call = {"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": "{}"}}
    ScriptedModel(
        page,
        said(RICH),
        ({"reasoning_content": "Hm.", "tool_calls": [call]}, "tool_calls"),
        said("x", "length"),
    )
    open_chat(page, served.url)
    set_fields(page)
    ask(page, "first")
    ask(page, "second")
    ask(page, "third")
    if is_phone:
        page.click("#menu")
    assert axe_findings(page) == []
    if is_phone:
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
