"""Our own inference-only engine: the forward of the supported models with a KV cache, fed by HF-named tensors."""
