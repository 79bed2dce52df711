"""Stages in which a model says yes or no to each question with its reference answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marsrl.rollout.agents.parsers import THINK_OPEN, visible
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Sampling
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.tasks.data import right_answers
from marsrl.rollout.types import Finish
from marsrl.trainer.config.curate import CriterionConfig
from marsrl.trainer.curate.criteria import CRITERIA, messages, read_verdict
from marsrl.trainer.curate.missing import MissingShare
from marsrl.trainer.curate.rows import Decision, Row
from marsrl.trainer.runs.answers import Answers, key_of

_AHEAD = 1024  # rows that are read ahead, so that every engine has enough to do
_WAIT_S = 1.0
_MAX_REASON = 400  # characters of an answer that are held and shown: its end, where the reason stands

_UNREADABLE = "no readable verdict"
_NO_REFERENCE = "(none is given)"
_SEVERAL = "Each of these is right:"

OpenPool = Callable[[], AbstractContextManager[tuple[ChatRenderer, EnginePool]]]


@dataclass(frozen=True, slots=True)
class _Said:
    """verdict: None where it cannot be read. reason: the end of the answer."""

    verdict: bool | None
    reason: str


class Judged:
    """One criterion. The engines start with the first question that has not been answered yet."""

    def __init__(
        self,
        name: str,
        config: CriterionConfig,
        policy: Mapping[str, Any],
        seed: int,
        open_pool: OpenPool,
        answers: Path,
    ) -> None:
        """policy: what tells the model from others, as JSON. answers: the file that keeps what it says."""
        self.name = name
        self._config, self._policy, self._seed = config, policy, seed
        self._criterion = CRITERIA[name]
        self._asked = {
            "instructions": config.instructions or self._criterion.instructions,
            "policy": policy,
            "seed": seed,
        }
        own = {"temperature", "top_p", "max_input_tokens", "max_response_tokens", "template_options"}
        self._asked |= config.model_dump(mode="json", include=own)
        self._open_pool = open_pool
        self._engines: tuple[ChatRenderer, EnginePool] | None = None
        self._stack = ExitStack()
        self._answers: Answers[_Said] = Answers(answers, _read)
        self._stack.callback(self._answers.close)
        self._share = MissingShare(f"curate.{name}.max_missing_share", config.max_missing_share)
        self._failed: dict[str, _Said] = {}  # by key: not kept, so asked again the next time
        self._under_way: set[str] = set()
        self._prompts: dict[str, str] = {}  # of those under way: how the prompt ends

    def settings(self) -> Mapping[str, Any]:
        return {**self._config.model_dump(mode="json"), **self._asked}

    def decisions(self, rows: Iterator[Row]) -> Iterator[tuple[Row, Decision]]:
        ahead: deque[tuple[Row, str]] = deque()
        is_more = True
        while True:
            while is_more and len(ahead) < _AHEAD:
                row = next(rows, None)
                is_more = row is not None
                if row is not None:
                    ahead.append((row, self._ask(row)))
            if not ahead:
                self._share.check("the stage is at its end")
                return
            while ahead and (said := self._said(ahead[0][1])) is not None:
                row, _ = ahead.popleft()
                self._share.count(said.verdict is None)
                if said.verdict is None:
                    self._share.check_early(f"{row.problem.id}: {said.reason[-200:]!r}")
                yield row, self._decision(said)
            if self._under_way:
                self._collect()

    def close(self) -> None:
        self._stack.close()

    def _said(self, key: str) -> _Said | None:
        return self._answers[key] if key in self._answers else self._failed.get(key)

    def _decision(self, said: _Said) -> Decision:
        if said.verdict is None:
            return Decision(self._config.missing == "keep", _UNREADABLE, said.reason)
        return Decision(said.verdict, self._criterion.yes if said.verdict else self._criterion.no, said.reason)

    def _ask(self, row: Row) -> str:
        """The key of its answer, which is asked for where it is not there or under way."""
        question, reference = row.problem.question, row.problem.answer
        references = [_NO_REFERENCE] if reference is None else right_answers(reference)
        answer = references[0] if len(references) == 1 else "\n".join((_SEVERAL, *references))
        key = key_of(question=question, answer=answer, **self._asked)
        if key in self._answers or key in self._failed or key in self._under_way:
            return key
        config = self._config
        renderer, pool = self._start()
        chat = messages(self._criterion, config.instructions, question, answer)
        prompt, text = renderer.render(chat, **config.template_options)
        if len(prompt) > config.max_input_tokens:
            too_long = f"the prompt has {len(prompt):,} tokens, at most curate.{self.name}.max_input_tokens"
            self._answers.add(key, {"too_long": f"{too_long} = {config.max_input_tokens:,}"})
            return key
        self._under_way.add(key)
        self._prompts[key] = text[-40:]
        sampling = Sampling(config.temperature, config.top_p, -1, renderer.stop_ids)
        seed = derive_seed(self._seed, "curate", self.name, key)
        pool.submit([DecodeRequest(key, prompt, config.max_response_tokens, sampling, seed, key)], version=0)
        return key

    def _start(self) -> tuple[ChatRenderer, EnginePool]:
        if self._engines is None:
            self._engines = self._stack.enter_context(self._open_pool())
        return self._engines

    def _collect(self) -> None:
        renderer, pool = self._start()
        for result in pool.collect(_WAIT_S):
            self._under_way.discard(result.uid)
            self._take(renderer, result, self._prompts.pop(result.uid))

    def _take(self, renderer: ChatRenderer, result: DecodeResult, prompt_end: str) -> None:
        if result.finish not in (Finish.STOP, Finish.LENGTH):
            self._failed[result.uid] = _Said(None, f"not answered: {result.error or result.finish.value}")
            return
        shown = visible(renderer.decode(result.token_ids), prompt_end.rstrip().endswith(THINK_OPEN))
        self._answers.add(result.uid, {"text": shown or ""})


def _read(answer: Any) -> _Said | None:
    """An answer of the file."""
    if not isinstance(answer, dict):
        return None
    if isinstance(answer.get("too_long"), str):
        return _Said(None, answer["too_long"])
    text = answer.get("text")
    return _Said(read_verdict(text), text[-_MAX_REASON:] or "no answer") if isinstance(text, str) else None
