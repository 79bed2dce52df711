"""Built-in inference engine: the forward pass of the supported models with a KV cache, fed by HF-named tensors."""
