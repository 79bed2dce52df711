"""Settings of external programs, which replace an orchestration of ours. Imports only pydantic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from marsrl.rollout.config import Count, CountOr0, Seconds, Settings, Size, VariableName


class ExternalConfig(Settings):
    """The program of orchestration=external and its workers. A session is one play of a problem."""

    function: str | None = None
    """FILE.py:FUNCTION that plays a session, `run(problem, client)`; may be async (docs/external.md)"""
    environment: str | None = None
    """in place of a function: FILE.py:CLASS with reset(problem) and step(text), which agents act in (docs/external.md)"""
    command: list[str] = Field(default_factory=list)
    """in place of both: a program that is started once a session, with the problem on its standard input"""
    python: str | None = None
    """interpreter of the workers, 3.9 or later: of a virtual environment of its own; default: this one"""
    workers: CountOr0 = 1
    """worker processes started here; 0: only those that join from elsewhere (worker.py --url)"""
    concurrency: Count = Field(64, description="sessions that a worker plays at once")
    timeout_s: Seconds = 600.0
    """a session fails that takes longer, without the time in which a call of it was being answered"""
    max_calls: Count = 256
    """calls of a session (in place of rollout.max_turns); further ones are refused"""
    superseded: Literal["mask", "train"] = "mask"
    """what becomes of an answer that no later call continues, and whose request the program sent again once it had it: mask: it
    was thrown away, and has no gradient; train: it is trained like all others. Equal requests that are open at once are branches;
    an answer that the program rewards by its id is trained"""
    attempts: Count = Field(
        3, description="times that a session is begun in all, if its workers are lost; then it fails"
    )
    host: str = Field("127.0.0.1", description="address on which workers and programs are answered")
    port: int = Field(0, ge=0, le=65535, description="0: any that is free")
    key_env: VariableName | None = None
    """environment variable with the key by which workers from elsewhere join; default: a random key"""
    max_body_mib: Size = Field(16, description="a larger request is refused, MiB")

    @model_validator(mode="after")
    def _say_who_plays(self) -> ExternalConfig:
        for key, name in (("function", self.function), ("environment", self.environment)):
            if name is not None and ":" not in name:
                raise ValueError(f"external.{key} is {name!r}; expected FILE.py:NAME")
        if bool(self.function) + bool(self.environment) + bool(self.command) != (self.workers > 0):
            raise ValueError(
                f"external.function is {self.function}, external.environment {self.environment}, external.command {self.command} "
                f"and external.workers {self.workers}: give one of the first three for workers that are started here, none of "
                "them with workers=0"
            )
        if not self.workers and not (self.port and self.key_env):
            raise ValueError(
                "external.workers is 0: set external.port and external.key_env, by which workers from elsewhere join"
            )
        return self
