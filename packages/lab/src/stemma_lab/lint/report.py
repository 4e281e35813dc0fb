"""Lint: what prompts share, where they part, what that costs, and what to move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stemma.errors import InvalidRequest
from stemma_lab.lint.bodies import Body, BodyPlace
from stemma_lab.lint.edits import Edit, Rule, Undone, edits
from stemma_lab.lint.prompts import LintedPrompt, Renderer
from stemma_lab.lint.tree import PromptTree, Trunk, num_common

_MIN_LOST_CHARS = 64
"""Characters that a change keeps from being shared: less is no finding."""
_MAX_UNDONE = 4
"""Changes that are undone of one prompt."""
MAX_PLACES = 20
_MAX_SHOWN_CHARS = 80
_TRUNK_END = 16

ADVICE = {
    Rule.TIMESTAMP: "move the time behind what is shared, best to the end of the last message, or round it",
    Rule.NONCE: "leave the id out, or move it behind what is shared",
    Rule.COUNTER: "move the counter behind what is shared",
    Rule.VALUE: "move the value behind what is shared",
    Rule.USER_TEXT: "put the shared text first, and what differs from request to request behind it",
    Rule.TOOLS_REORDERED: "send the tools in one order, such as by name",
    Rule.TOOLS_CHANGED: "keep one list of tools for a conversation; forbid calls by tool_choice instead",
    Rule.TEMPLATE: "use one version of the template for all; move a version number behind what is shared",
    Rule.SETTINGS: "set what the template writes into prompts alike for all that shall share them",
    Rule.IMAGE: "put the image behind the text that is shared",
}


@dataclass(slots=True)
class Finding:
    """One rule that prompts break at one place of theirs."""

    rule: Rule
    where: str
    """Part of the prompt."""
    yours: str
    theirs: str
    """What the first such prompt has there, and what the earlier one had."""
    earlier: BodyPlace
    places: list[BodyPlace] = field(default_factory=list)
    """Of the first such prompts."""
    num_prompts: int = 0
    lost_tokens: int = 0
    """Tokens that would have been shared."""

    @property
    def advice(self) -> str:
        """Return what to do."""
        return ADVICE[self.rule]


@dataclass(frozen=True, slots=True)
class SharedBeginning:
    """A beginning that several prompts share."""

    num_tokens: int
    num_prompts: int
    ends_with: str


@dataclass(frozen=True, slots=True)
class LintReport:
    """What was found in a set of prompts."""

    num_prompts: int
    num_tokens: int
    num_shared_tokens: int
    """That an earlier prompt begins with too."""
    reuse: float
    """The same as a share of the tokens of all prompts but the first."""
    reachable: float
    """With all findings mended."""
    models: tuple[str, ...]
    shared: list[SharedBeginning]
    findings: list[Finding]
    """The costliest first."""

    @property
    def lost_tokens(self) -> int:
        """Tokens that findings keep from being shared."""
        return sum(one.lost_tokens for one in self.findings)


def lint(
    bodies: Iterable[Body], renderer: Renderer, advance: Callable[[], None] = lambda: None
) -> LintReport:
    """Return what was found. Raises TraceError for a prompt that the template refuses."""
    tree, groups, models = PromptTree(), _Groups(), dict[str, None]()
    for body in bodies:
        prompt = renderer.prompt(body)
        models.setdefault(prompt.model)
        earlier = tree.add(prompt)
        if earlier is not None:
            for edit, lost in _costly(prompt, earlier, renderer):
                groups.add(edit, lost, prompt, earlier)
        advance()
    later = max(1, tree.num_tokens - tree.num_first)
    findings = groups.found()
    lost = sum(one.lost_tokens for one in findings)
    return LintReport(
        len(tree),
        tree.num_tokens,
        tree.num_shared,
        tree.reuse,
        min(1.0, (tree.num_shared + lost) / later),
        tuple(models),
        [_shared_beginning(one, tree, renderer) for one in tree.trunks()],
        findings,
    )


def _shared_beginning(trunk: Trunk, tree: PromptTree, renderer: Renderer) -> SharedBeginning:
    ends = renderer.text(tree.ends(trunk, _TRUNK_END))
    return SharedBeginning(trunk.num_tokens, trunk.num_prompts, _shown(ends))


class _Groups:
    """Findings by rule and place."""

    def __init__(self) -> None:
        self._groups: defaultdict[tuple[Rule, str], Finding | None] = defaultdict(lambda: None)

    def add(self, edit: Edit, lost: int, prompt: LintedPrompt, earlier: LintedPrompt) -> None:
        key = (edit.rule, edit.where)
        finding = self._groups[key]
        if finding is None:
            finding = Finding(edit.rule, edit.where, _shown(edit.yours), _shown(edit.theirs), earlier.place)
            self._groups[key] = finding
        finding.num_prompts += 1
        finding.lost_tokens += lost
        if len(finding.places) < MAX_PLACES:
            finding.places.append(prompt.place)

    def found(self) -> list[Finding]:
        known = [one for one in self._groups.values() if one is not None]
        return sorted(known, key=lambda one: one.lost_tokens, reverse=True)


def _costly(now: LintedPrompt, earlier: LintedPrompt, renderer: Renderer) -> list[tuple[Edit, int]]:
    """Return the edits that cost shared tokens, each with how many it costs once those before are undone."""
    candidates = list(edits(now.parts, earlier.parts))
    undone, shared = Undone(now.parts), num_common(now.tokens, earlier.tokens)
    found = []
    for _ in range(min(_MAX_UNDONE, len(candidates))):
        best = max(
            ((_shared(undone.with_edit(one), earlier, renderer), one) for one in candidates),
            key=lambda pair: pair[0],
        )
        if best[0] <= shared:
            break
        now_shared, edit = best
        candidates.remove(edit)
        undone = undone.with_edit(edit)
        lost = _lost(edit, earlier, shared, now_shared, renderer)
        if lost:
            found.append((edit, lost))
        shared = now_shared
    return found


def _shared(undone: Undone, earlier: LintedPrompt, renderer: Renderer) -> int:
    try:
        return num_common(renderer.tokens(undone.result()), earlier.tokens)
    except InvalidRequest:  # a template may refuse such a mixture
        return 0


def _lost(edit: Edit, earlier: LintedPrompt, before: int, after: int, renderer: Renderer) -> int:
    """Return the tokens that an edit keeps from being shared; 0: too few to speak of.

    What stands in its place is computed anyway, and the template's own marks between a prompt's last text and
    its end are shared by chance.
    """
    saved = renderer.text(earlier.tokens[before:after])
    num_chars = len(saved) - edit.num_own_chars - renderer.frame
    if edit.reach is not None:
        num_chars = min(num_chars, edit.reach)
    if num_chars < _MIN_LOST_CHARS:
        return 0
    return max(1, round((after - before) * num_chars / max(1, len(saved))))


def _shown(text: str) -> str:
    """Return the beginning of a text, or the end of a long one where that tells more."""
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."
