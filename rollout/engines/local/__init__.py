"""Our own inference-only engine: a Qwen2.5 / Qwen3 / Qwen3-MoE forward with a KV cache, fed by HF-named tensors."""
