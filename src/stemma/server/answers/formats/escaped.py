"""A grammar in Lark, or a regular expression, of text that stands in a JSON string.

Its terminals are escaped: only what JSON must escape, in the shortest way, so texts have one form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache

_CONTROLS = {chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)}
_ESCAPED = {**_CONTROLS, '"': '\\"', "\\": "\\\\"}
"""What JSON writes for the characters that can't stand for themselves."""
_PLAIN = r"[^\"\\\x00-\x1f]"
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r"\"([^\"\\]|\\.)*\"",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SH_COMMENT": r"#[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+([^\/*][^*]*\*+)*\/",
}
"""Lark's own terminals that hold characters which JSON escapes; the others stay as they are."""
_LARK = re.compile(
    r'(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<regex>/(?![/*])(?:[^/\\\n]|\\.)+/[a-z]*)|(?P<comment>//[^\n]*)'
    r"|(?P<common>%import[ \t]+common\.(?P<name>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?)"
    r"|(?P<ignored>%ignore[^\n]*)|(?P<word>\b_?[A-Z][A-Z0-9_]*\b)|(?P<other>%(?:json|regex|lark|import)\b|@\w+)"
)
_TERMINAL = re.compile(r"^[ \t]*(_?[A-Z][A-Z0-9_]*)[ \t]*:", re.MULTILINE)
_IGNORED = re.compile(r"^[ \t]*%ignore[ \t]+(\w+)", re.MULTILINE)
_REGEX = re.compile(
    r"(?P<set>\[\^?(?:\\.|[^\\])(?:\\.|[^\]\\])*\])"
    r"|(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.))|(?P<dot>\.)"
    r"|(?P<open>\(\?(?P<flags>[a-zA-Z-]*[:)]|[=!<P])?|\()|(?P<close>\))|(?P<char>(?s:.))"
)
_CLASSES = frozenset("dDsSwW")
_MEANT = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


def lark_of_regex(pattern: str) -> str:
    """Return a grammar in Lark of what `pattern` matches."""
    return "start: /" + re.sub(r"\\.|/", lambda it: r"\/" if it[0] == "/" else it[0], pattern) + "/\n"


def escaped_lark(grammar: str) -> str:
    """Return `grammar` for the text as JSON escapes it. Raises ValueError where that can't be said.

    Terminals become rules but for those that are ignored: a terminal that may go on with one escape must not
    wait for it where another one follows.
    """
    ignored = set(_IGNORED.findall(grammar))
    names = {name for name in _TERMINAL.findall(grammar) if name not in ignored}
    names |= {it["alias"] or it["name"] for it in _LARK.finditer(grammar) if it["name"] in _COMMON} - ignored
    return _LARK.sub(lambda found: _escaped_terminal(found, names), grammar)


def _escaped_terminal(found: re.Match[str], names: Collection[str]) -> str:
    text = found[0]
    match found.lastgroup:
        case "string":
            try:
                value = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{text[:64]} is no string of JSON's") from error
            return json.dumps(json.dumps(value, ensure_ascii=False)[1:-1], ensure_ascii=False)
        case "regex":
            pattern, _, flags = text[1:].rpartition("/")
            return escaped_regex(pattern, flags)
        case "word":
            return f"t_{text.lower()}" if text in names else text
        case "ignored":
            return text
        case "comment":
            return ""
        case "other":
            raise ValueError(f"{text} can't stand in a JSON string")
    if found["name"] not in _COMMON:
        return text
    name = found["alias"] or found["name"]
    if name in names:
        return f"t_{name.lower()}: {escaped_regex(_COMMON[found['name']])}"
    return f"{name}: {_whole(_REGEX.finditer(_COMMON[found['name']]))}"


def escaped_regex(pattern: str, flags: str = "") -> str:
    """Return what stands in a rule for `pattern`, of the text as JSON escapes it.

    Raises ValueError where that can't be said.
    """
    parts, is_dot_all = list(_REGEX.finditer(pattern)), "s" in flags
    head, last = parts, None
    if len(parts) > 1 and parts[-1][0] == ")" and _is_repeated_set(parts[:-1]) and parts[-4:-3]:
        if parts[-4].lastgroup in ("open", "flags"):
            is_dot_all = _dot_all_behind(parts[-4]["flags"] or ":", is_dot_all)
            head, last = parts[:-4], parts[-3:-1]
    elif _is_repeated_set(parts):
        head, last = parts[:-2], parts[-2:]
    flags = flags.replace("s", "")
    if last is None or any(part[0] in "|(" for part in head):
        return _whole(parts, flags, is_dot_all="s" in flags)
    sets = _set_of(last[0], is_dot_all=is_dot_all)
    assert sets is not None
    plain, escapes = sets
    inner = " | ".join([f"/{plain}+/{flags}", *([f"/{'|'.join(escapes)}/"] if escapes else [])])
    return f"({_whole(head, flags) if head else ''} ({inner}){last[1][0]})"


def _is_repeated_set(parts: Sequence[re.Match[str]]) -> bool:
    return len(parts) > 1 and parts[-1][0] in "*+" and _set_of(parts[-2], is_dot_all=False) is not None


def _whole(parts: Iterable[re.Match[str]], flags: str = "", *, is_dot_all: bool = False) -> str:
    return f"/{''.join(_escaped_parts(parts, is_dot_all))}/{flags}"


def _escaped_parts(parts: Iterable[re.Match[str]], is_dot_all: bool) -> Iterator[str]:
    dot_all = [is_dot_all]
    for found in parts:
        sets = _set_of(found, is_dot_all=dot_all[-1])
        if sets is not None:
            yield f"({'|'.join([sets[0], *sets[1]])})"
            continue
        match found.lastgroup:
            case "escape":
                yield _escaped_escape(found["escape"])
            case "open" | "flags":
                dot_all.append(_dot_all_behind(found["flags"] or ":", dot_all[-1]))
                yield found["open"].replace("s", "")
            case "close":
                dot_all = dot_all[:-1] or [is_dot_all]
                yield ")"
            case _:
                yield _literal(found["char"]) if found["char"] in _ESCAPED else found["char"]


def _dot_all_behind(flags: str, before: bool) -> bool:
    if set(flags) - set("si-:"):
        raise ValueError(f"(?{flags} can't be said of a JSON string")
    on, _, off = flags.partition("-")
    return "s" in on or (before and "s" not in off)


def _escaped_escape(escape: str) -> str:
    kind = escape[1]
    if kind in "xu" and len(escape) > 2:
        return _literal(chr(int(escape[2:], 16)))
    if kind.isalnum() and kind not in _MEANT:
        raise ValueError(f"{escape} can't be said of a JSON string")
    return _literal(_MEANT.get(kind, kind)) if _MEANT.get(kind, kind) in _ESCAPED else escape


def _literal(char: str) -> str:
    return "(" + _quoted(_ESCAPED.get(char, char)) + ")"


def _quoted(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace('"', r"\"")


def _set_of(found: re.Match[str], *, is_dot_all: bool) -> tuple[str, list[str]] | None:
    """Return what matches those of a set that stand for themselves, and its escapes; None: it is no set."""
    text = found[0]
    if found.lastgroup == "dot":
        text = "(?s:.)" if is_dot_all else "."
    elif found.lastgroup != "set" and not (found.lastgroup == "escape" and text[1] in _CLASSES):
        return None
    return _split(text, is_dot=found.lastgroup == "dot")


@lru_cache(maxsize=256)
def _split(text: str, *, is_dot: bool) -> tuple[str, list[str]]:
    if "[" in text[1:]:
        raise ValueError(f"{text[:64]}: a set within a set can't be said of a JSON string")
    try:
        matches: Callable[[str], object] = re.compile(text).fullmatch
    except re.error as error:
        raise ValueError(f"{text[:64]} can't be said of a JSON string") from error
    plain = _PLAIN if is_dot else f"[{text}&&{_PLAIN}]"
    return plain, [_quoted(escape) for char, escape in _ESCAPED.items() if matches(char)]
