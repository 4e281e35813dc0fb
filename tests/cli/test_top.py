"""`stemma top` computes rates from two looks, survives a restart, and shows no control characters."""

from __future__ import annotations

from rich.console import Console

from stemma.cli.top import TopView
from stemma.terminal_text import visible_json


def look(time: float, prompt: int, device: int, **changes) -> dict:
    engine = {
        "num_running": 1,
        "num_waiting": 0,
        "num_prompt_tokens": prompt,
        "num_generated_tokens": prompt // 10,
        "num_blocks": 100,
        "num_cached_blocks": 50,
        "num_evicted_blocks": 7,
        "num_regretted_blocks": 3,
        "cached_tokens_by_tier": {"device": device},
    }
    shown = {
        "time": time,
        "model": "m\x1b[31m",
        "started_at": 0,
        "failure": None,
        "engine": engine,
        "tenants": [{"name": "ada", "requests": 2, "prompt_tokens": 100, "cached_tokens": 25}],
        "under_way": [],
        "ended": [],
        "last_number": 0,
    }
    return shown | changes


def text_of(view: TopView) -> str:
    console = Console(width=140, highlight=False, markup=False, color_system=None)
    with console.capture() as capture:
        console.print(view.render())
    return capture.get()


def test_rates_come_from_two_looks():
    view = TopView()
    view.update(look(100.0, 1000, 300))
    assert "prompt 0 tok/s" in text_of(view)
    view.update(look(102.0, 2000, 1200))
    shown = text_of(view)
    assert "prompt 500 tok/s" in shown
    assert "60.0% since the start, 90.0% now" in shown
    assert "50 / 100" in shown
    assert "3 blocks evicted from the device came back within a minute" in shown
    assert "25.0%" in shown
    assert "\x1b[31m" not in shown


def test_a_restart_and_a_lost_server_are_no_error():
    view = TopView()
    view.update(look(100.0, 1000, 300))
    view.update(look(101.0, 10, 0, started_at=99))
    assert "prompt 0 tok/s" in text_of(view)
    view.problem = "connection refused"
    assert "connection refused" in text_of(view)


def test_a_request_that_never_started_has_no_share():
    ended = {
        "request": "r1",
        "outcome": "refused",
        "prompt_tokens": 10,
        "cached_tokens": None,
        "miss": None,
        "first_token_s": None,
        "total_s": 0.01,
    }
    waiting = {
        "request": "r2",
        "tenant": "",
        "age_s": 0.5,
        "prompt_tokens": 10,
        "cached_tokens": None,
        "generated_tokens": 0,
    }
    view = TopView()
    view.update(look(100.0, 1000, 300, ended=[ended], under_way=[waiting] * 14))
    shown = text_of(view)
    assert "refused" in shown
    assert "waits" in shown
    assert "and 2 more" in shown


def test_no_text_of_a_server_commands_the_terminal_or_ends_the_view():
    """Neither escapes nor rich's markup, wherever they stand."""
    evil = "[/x]\x1b[2J\x9b2J"
    ended = {
        "request": evil,
        "outcome": evil,
        "prompt_tokens": 10,
        "cached_tokens": 1,
        "miss": evil,
        "first_token_s": None,
        "total_s": 0.01,
    }
    tenants = [{"name": evil, "requests": 2, "prompt_tokens": 100, "cached_tokens": 25}]
    found = visible_json(look(100.0, 1000, 300, ended=[ended], tenants=tenants, model=evil, failure=evil))
    view = TopView()
    view.update(found)
    shown = text_of(view)
    assert shown.count("[/x]\\x1b[2J\\x9b2J") >= 5
    assert not {"\x1b", "\x9b"} & set(shown)
