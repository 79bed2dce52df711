"""Programs through the gateway: calls/s, rank 0's cost per call, and tokens/s compared with a native team.

    python benchmarks/gateway.py [--json FILE] [--sessions 64 256 1024] [--rounds 5]
    python benchmarks/gateway.py --turns 5 [...]           # also tokens/s compared with the native team; needs vLLM

Prints:

    calls       calls/s, and rank 0's CPU time and memory, for many concurrent sessions of 8 calls with 320 answer tokens. A
                Solver continues its sample, a Critic starts new ones. There is one worker process, engines cost nothing, and the
                tokenizer has the size of Qwen's. The CPU time is that of the player and the gateway's server, without the
                engines' CPU time. Memory is Python's peak allocation during a stage.
    tokens/s    a Solver, a Verifier and the Solver again with the default CPU model, rollout.overlap=2 and 256 sessions a stage,
                as a program and as an orchestration with the same prompts. The two run in their own processes and take turns;
                `ratio:` is the median over the turns of their ratio.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from rollout import Child, Side, measured, show_ratio

HERE = Path(__file__).resolve()
GROUP = 8  # sessions per problem
PAIRS = 4  # pairs of calls (Solver, Critic) per session
ANSWER = "this follows from the line before, and so on; " * 7  # each byte is a token
POLL_S = 0.1  # seconds between polls, as in player/rollout.py
TOKENS = 1 << 16  # minimum number of tokens decoded in a turn
SESSIONS = 256  # sessions per stage when tokens are counted
OVERLAP = 2  # with 1, engines would idle until the longest session of a stage ends


def alternate(problem: Any, client: Any) -> float:
    """Run the program whose calls are measured: each report of the Critic goes to the Solver, whose sample continues."""
    turns: list[Any] = [problem.question]
    for _ in range(PAIRS):
        solution = client.chat("solver", turns)
        report = client.chat("critic", [f"{problem.question}\n{solution.text}"])
        turns += [solution.message, report.text[:200]]
    return 1.0


def in_turn(problem: Any, client: Any) -> float:
    """Run the program whose tokens are measured: the team of in_turn.py."""
    solution = client.chat("solver", [problem.question])
    report = client.chat("verifier", [f"{problem.question}\n{solution.text}"])
    client.chat("solver", [f"{problem.question}\n{solution.text}\n{report.text}"])
    return 1.0


def calls(sessions: int, rounds: int) -> dict[str, Any]:
    """Play stages with this many sessions: a warm-up, the timed rounds, and one more to measure memory.

    Runs in a child process.
    """
    from marsrl.rollout.imports import imports_for_good

    with imports_for_good():
        from random_models import write_large_tokenizer

        from marsrl.rollout.agents.render import ChatRenderer
        from marsrl.rollout.config import AgentConfig, RolloutConfig
        from marsrl.rollout.engines.protocol import DecodeResult
        from marsrl.rollout.engines.scripted import ScriptedEngine
        from marsrl.rollout.gateway.config import ExternalConfig
        from marsrl.rollout.gateway.server import open_gateway
        from marsrl.rollout.gateway.vllm_reader import agents_of
        from marsrl.rollout.orchestrations.external import External
        from marsrl.rollout.player.stages import Stages
        from marsrl.rollout.pool.pool import EnginePool
        from marsrl.rollout.pool.replicas import LocalReplicas
        from marsrl.rollout.rewards.judge import known
        from marsrl.rollout.team import Team, WatchedJudge
        from marsrl.rollout.types import Problem, Reward

    agents = {name: AgentConfig(max_input_tokens=8192) for name in ("solver", "critic")}
    stage = {"prompts_per_step": sessions // GROUP, "group_size": GROUP, "max_response_tokens": 8192}
    config = RolloutConfig.model_validate(stage)
    external = ExternalConfig(function=f"{HERE}:{alternate.__name__}", concurrency=sessions)
    with tempfile.TemporaryDirectory() as folder:
        write_large_tokenizer(folder)
        renderer = ChatRenderer(folder)
    renderers, answer = {"main": renderer}, renderer.encode_trusted(ANSWER).tolist()

    class CountedEngine(ScriptedEngine):
        cpu_s = 0.0  # CPU seconds of all engines, in this process

        def collect(self, timeout_s: float) -> list[DecodeResult]:
            begin = time.thread_time()
            try:
                return super().collect(timeout_s)
            finally:
                CountedEngine.cpu_s += time.thread_time() - begin

    engines = [CountedEngine(lambda request: answer, decode=renderer.decode) for _ in range(8)]
    pools = {"main": EnginePool(LocalReplicas(engines), slots=256)}
    with open_gateway(external, agents_of(agents, renderers, config.max_response_tokens)) as gateway:
        orchestration = External(agents, "math", None, config)
        team = Team(
            agents,
            orchestration,
            renderers,
            pools,
            WatchedJudge(lambda problem, answer: known(Reward(1.0, 1.0))),
            gateway=gateway,
        )

        def question(n: int) -> Problem:
            return Problem(f"p{n}", f"What is {n} modulo 7? {'Think step by step. ' * 5}", "7", "math")

        stages = Stages(config, team, question, seed=0, trains_whole=True)

        def play() -> dict[str, float]:
            CountedEngine.cpu_s, wall_s, cpu_s = 0.0, time.perf_counter(), time.process_time()
            stages.resume({"main": 0})
            stages.want()
            while (batch := stages.take()) is None:
                stages.advance(POLL_S)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s - CountedEngine.cpu_s
            num_calls = batch.metrics["team/calls"]
            if num_calls != 2 * PAIRS * sessions:
                raise SystemExit(f"{num_calls:g} calls of {2 * PAIRS * sessions} were answered")
            return {"calls_per_s": num_calls / wall_s, "cpu_ms": 1e3 * cpu_s / num_calls}

        played = [play() for _ in range(rounds + 1)][1:]
        tracemalloc.start()
        play()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    worker_ms = 1e3 * (workers.ru_utime + workers.ru_stime) / (2 * PAIRS * sessions * (rounds + 2))
    return {"sessions": sessions, "rounds": played, "worker_cpu_ms": worker_ms, "session_bytes": peak / sessions}


def play(model_dir: str, orchestration: str) -> Side:
    """For each message of the parent, decode at least TOKENS tokens and yield {"tokens", "seconds"}."""
    from marsrl.rollout.imports import imports_for_good

    with imports_for_good():  # as in runs
        from marsrl.rollout.player.rollout import Rollout
        from marsrl.rollout.player.stages import Stages
        from marsrl.trainer.build import open_team
        from marsrl.trainer.checks.preflight import preflight
        from marsrl.trainer.config.read import read_config

    settings = [
        f"rollout.prompts_per_step={SESSIONS // GROUP}",
        f"rollout.group_size={GROUP}",
        f"rollout.overlap={OVERLAP}",
    ]
    settings += ["rollout.max_response_tokens=56", f"orchestration={orchestration}"]
    settings += [
        f"agents.{agent}.{key}" for agent in ("solver", "verifier") for key in ("policy=main", "max_input_tokens=400")
    ]
    if orchestration == "external":
        settings += [f"external.function={HERE}:{in_turn.__name__}", f"external.concurrency={(OVERLAP + 1) * SESSIONS}"]
    checked = preflight(read_config(None, settings)[0], world_size=1)
    with open_team(checked, {"main": model_dir}) as team:
        stages, pool = Stages(checked.config.rollout, team, checked.task.problems(0), seed=0), team.pools["main"]
        answer: Any = None
        with closing(Rollout(stages)) as rollout:
            while True:
                with rollout.resting():  # while the other team is measured
                    yield answer
                before, start = sum(pool.num_decoded()), time.perf_counter()
                while (tokens := sum(pool.num_decoded()) - before) < TOKENS:
                    rollout.next_batch({"main": 0})
                answer = {"tokens": tokens, "seconds": time.perf_counter() - start}


def over_native(turns: int) -> list[dict[str, Any]]:
    """Measure the program and the native team in turns; return the turns without the warm-up."""
    from marsrl.trainer.models.init_model import init_model

    with tempfile.TemporaryDirectory() as folder:
        init_model("cpu_default", "arithmetic", Path(folder), seed=0, dtype="float32")
        names = ("external", f"{HERE.with_name('in_turn.py')}:InTurn")
        program, native = (Child(play, folder, name) for name in names)
        with closing(program), closing(native):
            turns_played = ((program.ask(turn), native.ask(turn)) for turn in range(turns + 1))
            return measured(turns_played, "program", "native")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument(
        "--sessions",
        type=int,
        nargs="*",
        default=[64, 256, 1024],
        help=f"numbers of concurrent sessions; multiples of {GROUP}",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed stages for each number of sessions")
    parser.add_argument(
        "--turns", type=int, default=0, help="measured turns of the program and the native team; 0: measure calls only"
    )
    options = parser.parse_args()
    from marsrl.trainer.machine import commit, device_name

    record: dict[str, Any] = {"device": device_name(), "commit": commit(), "calls": []}
    for sessions in options.sessions:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            result = process.submit(calls, sessions, options.rounds).result()
        record["calls"].append(result)
        speeds, cpu = ([round_result[name] for round_result in result["rounds"]] for name in ("calls_per_s", "cpu_ms"))
        print(
            f"{sessions:,} sessions: {statistics.median(speeds):,.0f} calls/s ({min(speeds):,.0f} to {max(speeds):,.0f}); a call "
            f"takes {statistics.median(cpu):.2f} ms of rank 0's CPU ({min(cpu):.2f} to {max(cpu):.2f}), "
            f"{result['worker_cpu_ms']:.2f} of the worker's; {result['session_bytes'] / 2**10:,.0f} KiB a session",
            flush=True,
        )
    if options.turns:
        record["turns"] = over_native(options.turns)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
    if options.turns:
        show_ratio(record["turns"], "program", "native")
    return 0


if __name__ == "__main__":
    sys.exit(main())
