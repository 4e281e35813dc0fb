"""From texts to requests for one vector each, and from pairs of texts to their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stemma.engine.pooling import Pooling
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.scoring import Scoring
from stemma.errors import InvalidRequest
from stemma.model.lora.adapter import Adapter
from stemma.server.door.answer_memory import ID_BYTES, PromptTold
from stemma.server.schemas.shared import KeptRequest
from stemma.server.turn.build import Asked, Prompt
from stemma.server.turn.hints import hints_of
from stemma.server.turn.intake import Intake
from stemma.server.turn.prompts import check_length, text_prompt
from stemma.types import TokenArray

_NO_ANSWER = SamplingParams(max_tokens=1, temperature=0.0)
"""Parameters of requests that give a vector: the least that budgets know."""


def pooling_asked(
    name: str,
    prompts: Sequence[TokenArray],
    pooling: Pooling,
    body: KeptRequest,
    adapter: Adapter | None,
    vector_bytes: int,
) -> list[Asked]:
    """Return what is asked for the vector of each prompt, which takes so many bytes, told or kept.

    `name` begins their ids. All prompts are there until the last has its vector, and some are told again.
    """
    hints = hints_of(body)
    return [
        Asked(
            request_id=f"{name}-{index}",
            prompt=Prompt(tokens),
            params=_NO_ANSWER,
            hints=hints,
            pooling=pooling,
            adapter=adapter,
            told=PromptTold(once=vector_bytes + ID_BYTES * len(tokens)),
        )
        for index, tokens in enumerate(prompts)
    ]


@dataclass(frozen=True, slots=True)
class ReadPairs:
    """Prompts that the model reads for some pairs, each text once."""

    prompts: list[TokenArray]
    numbers: list[tuple[int, ...]]
    """For each pair: which of `prompts` belong to it, in the order that `Scoring.texts` has."""


async def read_pairs(
    intake: Intake,
    scoring: Scoring,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    *,
    param: str,
    salt: str,
) -> ReadPairs:
    """Return the prompts of the pairs. Raises InvalidRequest, PromptTooLong and TookTooLong.

    `param`: the field that holds the documents. `salt`: as `tokenized` has it.
    """
    for query, document in pairs:
        if not query or not document:
            raise InvalidRequest("a text is empty", param=param)
        check_length(intake, len(query) + len(document) + len(instruction or ""), param)
    read = await intake.tokenize_in_thread(
        lambda: [scoring.texts(query, document, instruction) for query, document in pairs]
    )
    unique = {
        text: number for number, text in enumerate(dict.fromkeys(one for texts in read for one in texts))
    }
    prompts = [
        await text_prompt(
            intake, text, add_special_tokens=scoring.adds_special_tokens, param=param, salt=salt
        )
        for text in unique
    ]
    return ReadPairs(prompts, [tuple(unique[text] for text in texts) for texts in read])
