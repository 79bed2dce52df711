"""vLLM alone, none of our engine: a plain LLM of a directory, scoring a prompt.

    python tests/megatron/vllm_scores.py '{"NAME": ["DIRECTORY", [token, ...]], ...}'

Prints {NAME: [log-prob of each token but the first]}.
"""

import json
import sys

from vllm import LLM, SamplingParams

found = {}
for name, (folder, tokens) in json.loads(sys.argv[1]).items():
    llm = LLM(
        model=folder, dtype="float32", enforce_eager=True, block_size=32, max_model_len=128, max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20, skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (result,) = llm.generate([{"prompt_token_ids": tokens}], wanted, use_tqdm=False)
    found[name] = [each[token].logprob for token, each in zip(tokens[1:], result.prompt_logprobs[1:])]
    llm.llm_engine.engine_core.shutdown()
print(json.dumps(found))
