"""Settings of external programs, which replace a built-in orchestration. Imports only pydantic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from marsrl.rollout.config import Count, CountOr0, Seconds, Settings, Size, VariableName


class ExternalConfig(Settings):
    """Program of orchestration=external and its workers. A session is one play of a problem."""

    function: str | None = None
    """FILE.py:FUNCTION that runs a session, `run(problem, client)`; may be async (docs/external.md)"""
    environment: str | None = None
    """instead of a function: FILE.py:CLASS with reset(problem) and step(text), in which agents act (docs/external.md)"""
    command: list[str] = Field(default_factory=list)
    """instead of function or environment: a program, started once per session, with the problem on its standard input"""
    python: str | None = None
    """Python interpreter of the workers, 3.9 or later, such as one of another virtual environment; default: this one"""
    workers: CountOr0 = 1
    """worker processes started here; 0: only remote workers run sessions (worker.py --url)"""
    concurrency: Count = Field(64, description="maximum concurrent sessions of a worker")
    timeout_s: Seconds = 600.0
    """maximum session time, not counting time in which its calls were being answered; a longer session fails"""
    max_calls: Count = 256
    """maximum calls of a session (instead of rollout.max_turns); further ones are rejected"""
    max_lineages: Count = 64
    """maximum number of distinct lineage names in the headers of a session's calls (docs/external.md); calls with further
    names are rejected"""
    superseded: Literal["mask", "train"] = "mask"
    """treatment of an answer that no later call continues, if the program repeated its request after reading it. mask:
    discarded, without gradient; train: trained like all others. Equal requests open at the same time are branches; an answer
    that the program rewards by id is always trained"""
    attempts: Count = Field(3, description="maximum starts of a session whose workers are lost; then the session fails")
    host: str = Field("127.0.0.1", description="address on which the gateway listens to workers and programs")
    port: int = Field(0, ge=0, le=65535, description="port of the gateway; 0: any free port")
    key_env: VariableName | None = None
    """environment variable with the key that remote workers need; default: a random key"""
    max_body_mib: Size = Field(16, description="maximum request size, MiB")

    @model_validator(mode="after")
    def _say_who_plays(self) -> ExternalConfig:
        for key, name in (("function", self.function), ("environment", self.environment)):
            if name is not None and ":" not in name:
                raise ValueError(f"external.{key} is {name!r}; expected FILE.py:NAME")
        if bool(self.function) + bool(self.environment) + bool(self.command) != (self.workers > 0):
            raise ValueError(
                f"external.function is {self.function}, external.environment {self.environment}, external.command "
                f"{self.command} "
                f"and external.workers {self.workers}; set exactly one of the first three for workers started here, or none of "
                "them with workers=0"
            )
        if not self.workers and not (self.port and self.key_env):
            raise ValueError(
                "external.workers is 0, so only remote workers run sessions, and they need external.port and "
                "external.key_env; set both"
            )
        return self
