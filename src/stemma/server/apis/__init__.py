"""One module or package per API that clients speak: OpenAI, Anthropic, TGI, vLLM. Packages bring more."""
