"""Engines without cost, and a tokenizer of Qwen's size without a model, to measure only rank 0's work (scale.py)."""

from __future__ import annotations

import heapq
import pickle
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from simulation.lengths import Lengths, Outcomes
from simulation.simulated_team import last_token

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.engines.texts import Texts
from marsrl.rollout.pool.replicas import PICKLE_PROTOCOL, OnLost, Replicas, Timed, ignore_loss
from marsrl.rollout.types import Finish

VOCABULARY = 151_643
SHORTEST = 320  # tokens: what the words at the end take
TOKENS_PER_S, POLL_S = 30.0, 0.1  # of a sample; as player/rollout.py does


def write_tokenizer(folder: str) -> None:
    """Write a byte-level BPE tokenizer of Qwen's size without merges, so that encoding gives one token a byte."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    from marsrl.trainer.models.byte_tokenizer import CHAT_TEMPLATE

    rng, pieces = random.Random(0), {piece: i for i, piece in enumerate(sorted(ByteLevel.alphabet()))}
    while len(pieces) < VOCABULARY:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7)))
        pieces.setdefault(rng.choice(("", "\u0120")) + word, len(pieces))
    tokenizer = Tokenizer(BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in ("<think>", "</think>")])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


class CostlessEngines(Replicas):
    """Engines on a virtual clock. own_cpu_s: CPU seconds that they use in this process, for texts and their ends of messages too.

    num_long: number of next completions with a drawn length; the others get the shortest. now_s: virtual time.
    received, returned: bytes of the messages to them and back.
    """

    def __init__(self, num_engines: int, lengths: Lengths, shorten: int, longest: int, renderer: ChatRenderer) -> None:
        self.own_cpu_s, self.now_s, self.num_long = 0.0, 0.0, 0
        self.long: set[str] = set()
        self.received = self.returned = self.num_results = 0
        self._num_engines, self._lengths, self._shorten, self._longest = num_engines, lengths, shorten, longest
        self._words = np.random.default_rng(0).integers(256, VOCABULARY, 1 << 20).astype(np.int32)
        filler = "this follows from the line before, and so on; " * 5
        texts = (
            "",
            f"{filler}\\boxed{{7}}",
            f"{filler}\\boxed{{8}}",
            f"{filler}\nVerdict: correct",
            f"{filler}\nVerdict: wrong",
        )
        self._ends = [renderer.encode_trusted(f"</think>\n{text}<|im_end|>") for text in texts]
        assert max(map(len, self._ends)) < SHORTEST
        self._outcomes, self._texts = Outcomes(0.5, 0.7), Texts(renderer.decode)
        self._left: dict[str, int] = {}  # tokens of a completion that has begun
        self._due: list[tuple[float, int, int, DecodeResult]] = []
        self._ticket = 0

    def __len__(self) -> int:
        return self._num_engines

    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        message = pickle.dumps(requests, PICKLE_PROTOCOL)
        begin = time.thread_time()
        self.received += len(message)
        for request in pickle.loads(message):
            self._ticket += 1
            result = self._result(request, version)
            due = self.now_s + len(result.token_ids) / TOKENS_PER_S
            heapq.heappush(self._due, (due, self._ticket, replica, result))
        self.own_cpu_s += time.thread_time() - begin

    def collect(self, busy: Sequence[int], timeout_s: float, *, is_urgent: bool = True) -> list[tuple[int, Timed]]:
        begin = time.thread_time()
        if self._due:
            self.now_s = max(self.now_s, self._due[0][0] + POLL_S)
        answers: dict[int, list[DecodeResult]] = {}
        while self._due and self._due[0][0] <= self.now_s:
            _, _, replica, result = heapq.heappop(self._due)
            answers.setdefault(replica, []).append(result)
            self.num_results += 1
        messages = {replica: pickle.dumps(results, PICKLE_PROTOCOL) for replica, results in answers.items()}
        self.returned += sum(map(len, messages.values()))
        self.own_cpu_s += time.thread_time() - begin
        return [(replica, Timed(pickle.loads(each), 0.0, 0.0)) for replica, each in messages.items()]

    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], on_lost: OnLost = ignore_loss
    ) -> dict[int, Timed]:
        raise ValueError(f"engines of a benchmark only decode: they have no {method}")

    def abort(self, busy: Sequence[int], adapter: str | None = None) -> None:
        if busy:
            raise NotImplementedError("nothing is interrupted here")

    def num_decoded(self, within_s: float) -> list[int]:
        return [0] * self._num_engines

    def close(self) -> None:
        self._due.clear()

    def _result(self, request: DecodeRequest, version: int) -> DecodeResult:
        uid = request.uid
        if uid not in self._left:
            self._left[uid] = SHORTEST
            if len(self.long) < self.num_long:
                self.long.add(uid)
                drawn = min(self._longest, self._lengths.tokens(uid))
                self._left[uid] = max(SHORTEST, drawn // self._shorten)
        num_new = min(self._left[uid], request.max_new_tokens)
        self._left[uid] -= num_new
        start = request.seed % (len(self._words) - num_new)
        tokens = self._words[start : start + num_new].copy()
        if self._left[uid] == 0:
            del self._left[uid]
            end = self._ends[last_token(self._outcomes, uid)]
            tokens[-len(end) :] = end[-num_new:]
        is_over = uid not in self._left
        logprobs = np.full(num_new, -0.5, np.float32)
        finish = Finish.STOP if is_over else Finish.LENGTH
        return self._texts.told(request, DecodeResult(uid, tokens, logprobs, finish, version))
