"""What this server tells routers of itself."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from stemma.server.operator.context import OperatorContext
from stemma.told import MAX_ADAPTERS, Told, ToldLoad, ToldModel, adapter_root


def told_of(context: OperatorContext) -> Told:
    """Return its load and its speeds now, and what it serves."""
    engine, metrics = context.engine, context.instruments.metrics
    load, seat, gap = engine.load, metrics.seat, metrics.gap
    return Told(
        decode_s_per_token=_rounded(gap.slowest_s),
        load=ToldLoad(
            seats=load.num_seats,
            running=load.num_running,
            waiting=load.num_waiting,
            kv_in_use=round(load.kv_in_use, 3),
            seat_s=_rounded(seat.mean_s),
            answer_tokens=round(metrics.answer_tokens.mean_s, 1) if seat.num_samples else None,
            prefill_s_per_token=_rounded(load.prefill_s_per_token),
            row_s=_rounded(load.row_s),
        ),
        serves=ToldModel(
            block_size=engine.key_space.block_size,
            model=_digest(engine.key_space.model_fingerprint),
            kv=_digest(engine.key_space.kv_layout),
            template=_digest(engine.tokenizer.chat_template or ""),
            adapters=tuple(
                (adapter_root(one.name), adapter_root(one.adapter.key))
                for one in engine.adapters.all()[:MAX_ADAPTERS]
            ),
        ),
    )


def _rounded(seconds: float | None) -> float | None:
    """Return a time with three digits; None: it isn't known."""
    return float(f"{seconds:.3g}") if seconds else None


@lru_cache(maxsize=16)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
