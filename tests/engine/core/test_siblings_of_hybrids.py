"""Several answers to one prompt, by a model with recurrent layers."""

from __future__ import annotations

from pathlib import Path

from tests import hybrids

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams


def test_siblings_of_a_prompt_shorter_than_a_block_go_on_over_its_end(tmp_path: Path) -> None:
    """A sibling begins where the first is, which is no checkpoint."""
    path = hybrids.build("qwen3_5_text", tmp_path / "hybrid")
    params = SamplingParams(n=3, seed=5, max_tokens=80, ignore_eos=True)
    with_drafts, alone = (
        LLM(path, kv_cache_memory="4MB", num_threads=1, speculation=mode) for mode in ("auto", "off")
    )
    try:
        found = [
            [one.token_ids for one in llm.generate([list(range(40, 60))], params)[0].completions]
            for llm in (with_drafts, alone)
        ]
    finally:
        with_drafts.close()
        alone.close()
    assert found[0] == found[1]
    assert [len(one) for one in found[0]] == [80] * 3
