"""The product that `benchmarks/device` asks a GPU about, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.device.product_probe import multiply

from stemma.model.cuda.products import launch_of, num_pieces


@pytest.mark.parametrize("num_tokens", [1, 17, 130])
def test_it_is_the_product(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x, w = torch.randn(num_tokens, 256, generator=generator), torch.randn(128, 256, generator=generator)
    torch.testing.assert_close(multiply(x, w), (x.double() @ w.double().T).float(), rtol=1e-5, atol=1e-4)


def test_pieces_depend_on_the_weight_alone_and_tiles_on_the_tokens() -> None:
    assert [num_pieces(*shape) for shape in ((4096, 4096), (128_256, 4096), (896, 4864))] == [8, 1, 4]
    assert [launch_of(count).block_t for count in (1, 16, 17, 100, 128, 129, 8192)] == [
        *(16, 16, 32, 128, 128, 128, 128)
    ]
    assert [launch_of(count).is_apart for count in (128, 129)] == [True, False]
