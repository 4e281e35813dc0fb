"""One module or package per API that clients speak: OpenAI, Anthropic, TGI, vLLM, Triton, MindIE."""
