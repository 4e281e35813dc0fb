from __future__ import annotations

import numpy as np
import pytest

from stemma.native.copying import copy_function


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 4095, 4096, 4300, 16384, 16385, 100_003, 786_432])
@pytest.mark.parametrize("offset", [0, 1, 17, 64])
def test_every_byte_is_copied_and_no_other(num_bytes: int, offset: int) -> None:
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + 200, dtype=np.uint8)
    target = np.zeros(num_bytes + 200, dtype=np.uint8)
    copy_function()(target[offset : offset + num_bytes], source[3 : 3 + num_bytes])
    assert np.array_equal(target[offset : offset + num_bytes], source[3 : 3 + num_bytes])
    assert not target[:offset].any()
    assert not target[offset + num_bytes :].any()
