"""What an engine keeps of vLLM's steps while a request runs. vLLM's core is scripted."""

from __future__ import annotations

from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest
from engine_cases import request

from marsrl.rollout.engines.protocol import Records
from marsrl.rollout.engines.time_shares import TimeShares
from marsrl.rollout.engines.vllm.engine import VllmEngine, _Running


@pytest.mark.parametrize("records", [Records(), Records(kept_tokens=True), Records(experts=True)])
def test_step_outputs_are_kept_only_for_records(records: Records) -> None:
    """One request runs two steps; the second gives two tokens, as with draft tokens.

    vLLM lists several log-probs per token, of which the first is the sampled token's.
    """
    steps = [([5], [[-0.1, -0.2]]), ([6, 7], [[-0.3, -0.4], [-0.5, -0.6]])]
    outputs = [
        Namespace(
            request_id="k",
            new_token_ids=tokens,
            new_logprobs=Namespace(logprobs=np.array(listed, np.float32)),
            new_sampling_mask=None,
            prefill_stats=None,
            finish_reason=None,
        )
        for tokens, listed in steps
    ]
    engine: Any = VllmEngine.__new__(VllmEngine)
    running = _Running("k", request("u", np.arange(3, dtype=np.int32), 9))
    waiting = iter(outputs)
    engine.__dict__ |= {
        "_core": Namespace(get_output=lambda: Namespace(outputs=[next(waiting)])),
        "_shares": TimeShares(),
        "_under_way": {"k": running},
        "_draws": "engine",
        "_spec": Namespace(records=records),
        "_watched": set(),
        "_num_decoded": 0,
        "_vocab_size": 8,
    }
    assert not engine._step() and not engine._step()  # the request has not ended
    assert running.told == (outputs if records.kept_tokens or records.experts else [])
    del running.token_ids[2:]  # as a stop string truncates it
    ((logprobs, kept),) = engine._drawn([running])
    assert kept is None and logprobs.dtype == np.float32
    np.testing.assert_array_equal(logprobs, np.array([-0.1, -0.3], np.float32))
