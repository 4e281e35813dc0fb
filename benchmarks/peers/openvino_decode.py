"""Time OpenVINO GenAI's decode, in its own environment: `python openvino_decode.py MODEL THREADS TOKENS`.

Prints one line of JSON: the median milliseconds of an output token at batch 1, after a prompt of 64 tokens.
"""

from __future__ import annotations

import json
import statistics
import sys

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    """Generate some answers; the pipeline times itself."""
    model, threads, num_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pipeline = genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads, INFERENCE_PRECISION_HINT="bf16")
    rng = np.random.default_rng(0)
    config = genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True)
    medians = []
    for _ in range(4):
        ids = ov.Tensor(rng.integers(3, 30_000, (1, 64)).astype(np.int64))
        result = pipeline.generate(ids, config)
        medians.append(result.perf_metrics.get_tpot().mean)
    print(json.dumps({"tpot_ms": statistics.median(medians[1:])}))


if __name__ == "__main__":
    main()
