"""Stop strings, stop ids, EOS and lengths against a definition that looks at the whole text at once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from stemma.engine.output.detokenizer import WindowDetokenizer
from stemma.engine.output.stopping import Progress, StopChecker
from stemma.engine.sampling.ending import EndingRule
from stemma.engine.sampling.params import SamplingParams
from stemma.types import FinishReason

EOS = 0


class Letters:
    """A decoder whose token i is the text `PIECES[i]`; token 0 is the end of sequence."""

    PIECES = ("<e>", "a", "b", "c", "ab", "bc", "abc", "ca")
    special_token_ids = frozenset([EOS])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.PIECES[i] for i in token_ids if i != EOS or not skip_special_tokens)


def run(params: SamplingParams, tokens: Sequence[int], *, max_output_tokens: int = 100) -> list[Progress]:
    """Feed tokens until the checker stops; a missing end is a LENGTH by max_tokens."""
    detokenizer = WindowDetokenizer(Letters(), skip_special_tokens=params.skip_special_tokens)
    checker = StopChecker(params, detokenizer, EndingRule.of(params, [EOS], max_output_tokens))
    result = []
    for token in tokens:
        result.append(checker.append(token))
        if result[-1].finish_reason:
            break
    return result


def text_of(progress: Sequence[Progress]) -> str:
    return "".join(p.text for p in progress)


def test_stop_string_across_tokens_is_held_back_and_cut() -> None:
    progress = run(SamplingParams(stop=("bca",), max_tokens=None), [1, 2, 3, 1])
    assert [p.text for p in progress] == ["a", "", "", ""]
    assert progress[-1] == Progress("", FinishReason.STOP, "bca")


def test_held_text_is_released_once_it_cannot_match() -> None:
    progress = run(SamplingParams(stop=("bca",), max_tokens=5), [1, 2, 3, 2, 1])
    assert [p.text for p in progress] == ["a", "", "", "bc", "ba"]
    assert progress[-1].finish_reason is FinishReason.LENGTH


def test_stop_string_may_be_included() -> None:
    params = SamplingParams(stop=("cc",), include_stop_str_in_output=True)
    progress = run(params, [1, 3, 6, 3])
    assert text_of(progress) == "acabcc"
    assert progress[-1].stop_reason == "cc"


def test_the_stop_string_complete_first_wins() -> None:
    progress = run(SamplingParams(stop=("ca", "bc")), [6, 7])
    assert text_of(progress) == "a"
    assert progress[-1].stop_reason == "bc"


def test_eos_ends_without_text_or_stop_reason() -> None:
    progress = run(SamplingParams(skip_special_tokens=False), [1, EOS])
    assert text_of(progress) == "a"
    assert progress[-1] == Progress("", FinishReason.STOP, None)


def test_eos_text_is_included_on_request_and_held_text_comes_before_it() -> None:
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True, stop=("bb",))
    assert text_of(run(params, [1, 2, EOS])) == "ab<e>"


def test_ignore_eos_goes_on() -> None:
    progress = run(SamplingParams(ignore_eos=True, max_tokens=3), [1, EOS, 2])
    assert (text_of(progress), progress[-1].finish_reason) == ("ab", FinishReason.LENGTH)


def test_stop_token_id_is_named_and_not_shown() -> None:
    progress = run(SamplingParams(stop_token_ids=(6,)), [1, 6, 1])
    assert (text_of(progress), progress[-1].stop_reason) == ("a", 6)


def test_context_limit_is_a_length() -> None:
    progress = run(SamplingParams(max_tokens=None), [1] * 9, max_output_tokens=4)
    assert (text_of(progress), progress[-1].finish_reason) == ("aaaa", FinishReason.LENGTH)


def test_nothing_stops_before_min_tokens() -> None:
    params = SamplingParams(stop=("a",), stop_token_ids=(2,), min_tokens=3)
    progress = run(params, [1, 2, EOS, 3, 4, 1])
    assert (text_of(progress), progress[-1].stop_reason) == ("abc", "a")


def test_a_stop_string_that_ends_after_min_tokens_counts_whole() -> None:
    progress = run(SamplingParams(stop=("abc",), min_tokens=2), [3, 1, 5])
    assert (text_of(progress), progress[-1].stop_reason) == ("c", "abc")


@given(
    tokens=st.lists(st.integers(1, 7), min_size=1, max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_equals_a_character_by_character_search(tokens: list[int], stops: list[str], include: bool) -> None:
    """The text ends at the stop string whose last character comes first, whatever the tokens were."""
    whole = Letters().decode(tokens)
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include, max_tokens=len(tokens))
    progress = run(params, tokens)
    for end in range(1, len(whole) + 1):
        ending = [stop for stop in stops if whole[:end].endswith(stop)]
        if ending:
            start = end - max(map(len, ending))
            assert text_of(progress) == whole[: end if include else start]
            assert progress[-1].finish_reason is FinishReason.STOP
            return
    assert text_of(progress) == whole
    assert progress[-1].finish_reason is FinishReason.LENGTH
