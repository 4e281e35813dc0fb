"""``stemma chat`` in a terminal and in a pipe, against a server that a script plays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.cli.terminal import Terminal, terminal

CTRL_C, CTRL_D, UP, ALT_ENTER = "\x03", "\x04", "\x1b[A", "\x1b\r"


class ScriptedServer:
    """Answers with the question in capital letters; a question that begins with "slow" has no end."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_broken_off = 0
        self.model = "scripted"
        self.url = ""

    def pieces(self, question: str) -> Iterator[str]:
        if question.startswith("slow"):
            for number in range(2000):
                yield f"{number} "
                time.sleep(0.02)
        if question.startswith("evil"):
            yield "\x1b]0;owned\x07\x1b[2Jgood\x9b2J"
        yield question.upper()


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    served = ScriptedServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            listed = {"data": [{"id": served.model}]}
            self.wfile.write(b"the tree \xc2\x9b2J\n" if "tree" in self.path else orjson.dumps(listed))

        def do_POST(self) -> None:
            body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
            served.bodies.append(body)
            self.send_response(200)
            self.end_headers()
            try:
                for piece in served.pieces(body["messages"][-1]["content"]):
                    self._send({"choices": [{"delta": {"content": piece}}]})
                self._send({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 2}})
            except OSError:
                served.num_broken_off += 1

        def _send(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + orjson.dumps(event) + b"\n\n")
            self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    yield served
    server.shutdown()
    server.server_close()


@pytest.fixture
def chat(scripted: ScriptedServer, tmp_path: Path) -> Iterator[Terminal]:
    with terminal(["chat", scripted.url], {"XDG_STATE_HOME": str(tmp_path)}) as running:
        running.wait_for("you:")
        yield running


def ask(chat: Terminal, question: str, answer: str) -> None:
    seen = len(chat.text)
    chat.type(question + "\r")
    end = chat.wait_for(answer, after=seen)
    chat.wait_for("you:", after=end)


def messages(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(chat: Terminal, scripted: ScriptedServer) -> None:
    seen = len(chat.text)
    chat.type("slow one\r")
    chat.wait_for("3 4 5", after=seen)
    chat.type(CTRL_C)
    end = chat.wait_for("stopped", after=seen)
    chat.wait_for("you:", after=end)
    ask(chat, "go on", "GO ON")
    assert chat.process.poll() is None
    question, partial, _ = messages(scripted.bodies[1])
    assert question == "slow one"
    assert partial.startswith("0 1 2 3 4 5")
    deadline = time.monotonic() + 10.0
    while not scripted.num_broken_off and time.monotonic() < deadline:
        time.sleep(0.05)
    assert scripted.num_broken_off == 1  # the server was told


def test_ctrl_c_at_an_empty_prompt_leaves(chat: Terminal) -> None:
    chat.type(CTRL_C)
    assert chat.wait() == 0


def test_ctrl_c_empties_a_line_first(chat: Terminal, scripted: ScriptedServer) -> None:
    seen = len(chat.text)
    chat.type("half a quest")
    chat.wait_for("quest", after=seen)
    chat.type(CTRL_C)
    time.sleep(0.3)
    ask(chat, "hello", "HELLO")
    assert messages(scripted.bodies[0]) == ["hello"]
    chat.type(CTRL_D)
    assert chat.wait() == 0


def test_up_brings_past_questions_back_also_those_of_earlier_chats(
    chat: Terminal, scripted: ScriptedServer, tmp_path: Path
) -> None:
    ask(chat, "hello", "HELLO")
    ask(chat, UP, "HELLO")
    assert messages(scripted.bodies[1]) == ["hello", "HELLO", "hello"]
    chat.type(CTRL_D)
    assert chat.wait() == 0
    history = tmp_path / "stemma" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0
    with terminal(["chat", scripted.url], {"XDG_STATE_HOME": str(tmp_path)}) as second:
        second.wait_for("you:")
        ask(second, UP, "HELLO")
    assert messages(scripted.bodies[2]) == ["hello"]


def test_questions_of_several_lines(chat: Terminal, scripted: ScriptedServer) -> None:
    ask(chat, f"one{ALT_ENTER}two", "TWO")
    ask(chat, "\x1b[200~three\nfour\x1b[201~", "FOUR")  # as a terminal pastes
    assert messages(scripted.bodies[1])[::2] == ["one\ntwo", "three\nfour"]


def test_commands(chat: Terminal, scripted: ScriptedServer) -> None:
    ask(chat, "/help", "/reset")
    ask(chat, "/rest", "/rest is no command; there are /help")
    ask(chat, "/tree", "the tree")
    ask(chat, "hello", "HELLO")
    ask(chat, "/reset", "a new conversation")
    ask(chat, "/etc/hosts is what?", "/ETC/HOSTS IS WHAT?")
    assert [messages(body) for body in scripted.bodies] == [["hello"], ["/etc/hosts is what?"]]
    chat.type("/exit\r")
    assert chat.wait() == 0


def test_an_answer_cannot_command_the_terminal(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.model = "[/x]\x1b[2J"
    run = subprocess.run(
        [sys.executable, "-m", "stemma", "chat", scripted.url],
        input="evil\n/tree\n",
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert "good" in run.stdout
    assert "the tree" in run.stdout
    assert "[/x]" in run.stdout
    assert not {"\x1b", "\x07", "\x9b"} & set(run.stdout)


def test_a_pipe(scripted: ScriptedServer, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "stemma", "chat", scripted.url],
        input="hello\n/nothing\nbye now\n",
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    assert "HELLO" in run.stdout
    assert "BYE NOW" in run.stdout
    assert "/nothing is no command" in run.stdout
    assert "\x1b" not in run.stdout
    assert not (tmp_path / "stemma").exists()
