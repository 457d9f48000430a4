"""The bridge between an engine and the actors. Only `facade`, `plugin` and `vllm_*` import vLLM or torch."""
