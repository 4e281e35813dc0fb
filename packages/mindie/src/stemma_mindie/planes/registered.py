"""What the entry point ``stemma.apis`` names."""

from __future__ import annotations

from stemma.server.guest_apis import GuestApi
from stemma_mindie.planes import faults, infer, management, tokenizer, triton
from stemma_mindie.planes.metric_names import MINDIE_NAMES

API = GuestApi(
    routers=(
        infer.router,
        triton.router,
        tokenizer.router,
        faults.router,
        faults.command_router,
        management.open_router,
        management.router,
        management.stop_router,
    ),
    metric_names=MINDIE_NAMES,
)
