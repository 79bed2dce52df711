"""Compare our scheduler and Ray actors with plain vLLM on the same prompts and lengths, in tokens per second of wall-clock time.

    python benchmarks/rollout.py [--json FILE] [--repeats 5] [--problems 64]
    python benchmarks/rollout.py --overlap 1 [...]       # four stages; engines decode the next stage while one is collected
    python benchmarks/rollout.py --engines 2 [...]       # two engines relative to one engine; each has one thread
    python benchmarks/rollout.py --model /models/smollm2 --problems 8 --repeats 3 [...]    # a model's directory
    python benchmarks/rollout.py --engine local [...]    # our own engine, relative to bare vLLM

`ours` is one stage of the scheduler: it renders prompts, sends requests to an actor of vLLM or of our own engine, receives tokens
with log-probs, and decodes, parses and judges the texts. With --model a single Solver answers word problems. `bare` is
vllm.LLM.generate with as many threads, without log-probs or seeds; it gets the length of every completion of ours in advance
(max_tokens, ignore_eos). The two run in separate processes and take turns; `ratio:` is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marsrl.trainer.checks.preflight import Checked

Side = Generator[Any, Any, None]  # yields None when ready, then a result for each message of the parent


def bare(model_dir: str, dtype: Any, max_num_seqs: int, max_model_len: int, kv_cache_mib: int, threads: int) -> Side:
    """For each message, a list of [prompt ids, completion length], yield the seconds of LLM.generate."""
    from marsrl.rollout.engines.vllm.arguments import vllm_environment

    os.environ.update(vllm_environment(threads))
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    torch.set_num_threads(threads)
    llm = LLM(
        model=model_dir, dtype=dtype, enforce_eager=True, block_size=32, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, kv_cache_memory_bytes=kv_cache_mib << 20, skip_tokenizer_init=True, seed=0,
    )  # fmt: skip
    work = yield None
    while True:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in work]
        sampling = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in work]
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        if [len(o.outputs[0].token_ids) for o in outputs] != [n for _, n in work]:
            raise RuntimeError("bare vLLM decoded other lengths than requested")
        work = yield seconds


def play(model_dir: str, stage: Sequence[str], engines: int, threads: int, overlap: int) -> Side:
    """For each requested seed, play stages and yield {"tokens", "seconds", "work": [[prompt ids, length], ...]}.

    A seed plays one stage, or four with rollout.overlap. tokens: number of all decoded tokens. work: prompts and lengths of the
    finished completions.
    """
    from marsrl.rollout.player.rollout import Rollout
    from marsrl.rollout.player.stages import Stages
    from marsrl.trainer.build import open_team

    settings = (f"rollout.engines={engines}", f"rollout.threads={threads}", f"rollout.overlap={overlap}")
    checked = checked_config(*stage, *settings, "rollout.placement=disaggregated")
    with open_team(checked, {"main": model_dir}) as team:
        seed = yield None
        while True:
            scheduler = Rollout(Stages(checked.config.rollout, team, checked.task.problems(seed), seed=seed))
            pool = team.pools["main"]
            before = sum(pool.num_decoded())
            start = time.perf_counter()
            batches = [scheduler.next_batch({"main": 0}) for _ in range(4 if overlap else 1)]
            scheduler.close()
            pool.drain()  # with overlap, engines have begun a fifth stage: its tokens count too
            seconds = time.perf_counter() - start
            tokens = sum(pool.num_decoded()) - before
            samples = [s for batch in batches for group in batch.groups for s in group.samples]
            work = [(s.prompt_ids.tolist(), len(s.token_ids)) for s in samples]
            seed = yield {"tokens": tokens, "seconds": seconds, "work": work}


def checked_config(*settings: str) -> Checked:
    from marsrl.trainer.checks.preflight import preflight
    from marsrl.trainer.config.read import read_config

    return preflight(read_config(None, settings)[0], world_size=1)


def stage_settings(words: argparse.Namespace, model_dir: Path, folder: Path) -> list[str]:
    """Return the settings of the stage. With --model, write its problems to the folder; without, use a random model."""
    settings = [f"rollout.prompts_per_step={words.problems}", "rollout.max_response_tokens=56"]
    settings += [f"rollout.engine={words.engine}", f"policies.main.dtype={words.dtype}"]
    if words.model is None:
        return settings
    problems = folder / "problems.jsonl"
    rows = [
        {"question": f"Anna has {a} books and buys {a + b} more. How many has she?", "answer": str(2 * a + b)}
        for a in range(11, 31)
        for b in range(5, 25)
    ]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings += ["task=math", f"policies.main.model={model_dir}", f"data.train={problems}", "orchestration=solver"]
    settings += ["agents.solver.max_input_tokens=192", "agents.solver.temperature=1.0"]
    return [*settings, "rollout.threads=1", "rollout.vllm.kv_cache_mib=1024"]


class Child:
    """Side of the comparison in a separate process, which is ready when the object is constructed."""

    def __init__(self, side: Callable[..., Side], *arguments: object) -> None:
        self._connection, child_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_answer, args=(child_end, side, arguments))
        self._process.start()
        child_end.close()
        self._connection.recv()

    def ask(self, question: Any) -> Any:
        self._connection.send(question)
        return self._connection.recv()

    def close(self) -> None:
        """Close the connection, which ends the process and its engines."""
        self._connection.close()
        self._process.join(60)
        self._process.kill()


def _answer(connection: Connection, side: Callable[..., Side], arguments: tuple[object, ...]) -> None:
    # Ray's workers import from the current directory; in a checkout, transformers would import our kernels/ instead of its own.
    os.chdir(tempfile.gettempdir())
    os.dup2(2, 1)  # Ray and vLLM print to stdout
    with closing(side(*arguments)) as answers, suppress(EOFError):
        connection.send(next(answers))
        while True:
            connection.send(answers.send(connection.recv()))


Turn = tuple[dict[str, Any], dict[str, Any]]  # tokens and seconds of each side; the first turn is a warm-up


def over_bare(model_dir: str, stage: Sequence[str], words: argparse.Namespace) -> Iterator[Turn]:
    config = checked_config(*stage).config
    longest = max(agent.max_input_tokens for agent in config.agents.values()) + config.rollout.max_response_tokens
    vllm, threads = config.rollout.vllm, config.rollout.threads or os.cpu_count() or 1
    player = Child(play, model_dir, stage, 1, threads, words.overlap)
    bare_side = Child(bare, model_dir, words.dtype, vllm.max_num_seqs, longest, vllm.kv_cache_mib, threads)
    with closing(player), closing(bare_side):
        for turn in range(words.repeats + 1):
            played = player.ask(turn)
            tokens = sum(length for _, length in played["work"])
            yield played, {"tokens": tokens, "seconds": bare_side.ask(played["work"])}


def over_one_engine(model_dir: str, stage: Sequence[str], words: argparse.Namespace) -> Iterator[Turn]:
    several, single = (Child(play, model_dir, stage, num, 1, words.overlap) for num in (words.engines, 1))
    with closing(several), closing(single):
        for turn in range(words.repeats + 1):
            yield several.ask(turn), single.ask(turn)


def measured(turns: Iterable[Turn], ours: str, other: str) -> list[dict[str, Any]]:
    """Print each turn; return the turns without the warm-up."""
    rows = []
    for turn, sides in enumerate(turns):
        speeds = [side["tokens"] / side["seconds"] for side in sides]
        ratio = speeds[0] / speeds[1]
        print(
            f"{f'turn {turn}' if turn else 'warm-up'}: {sides[0]['tokens']} tokens; {ours} {speeds[0]:,.0f} tokens/s, "
            f"{other} {speeds[1]:,.0f} tokens/s, ratio {ratio:.3f}",
            flush=True,
        )
        seconds = {"ours_s": sides[0]["seconds"], "other_s": sides[1]["seconds"]}
        rows.append({"tokens": sides[0]["tokens"], **seconds, "speeds": speeds, "ratio": ratio})
    return rows[1:]


def show_ratio(rows: list[dict[str, Any]], ours: str, other: str) -> None:
    for side, name in enumerate((ours, other)):
        print(f"{name}: {statistics.median(row['speeds'][side] for row in rows):,.0f} tokens/s, median of the turns")
    ratios = [row["ratio"] for row in rows]
    print(f"spread of the turns: {min(ratios):.3f} to {max(ratios):.3f}\nratio: {statistics.median(ratios):.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--problems", type=int, default=64, help="number of new problems of the stage, 8 samples each")
    parser.add_argument(
        "--engines", type=int, help="compare this number of engines with one engine; each has one thread"
    )
    parser.add_argument("--model", type=Path, help="directory of a chat model, in place of a random one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--engine", choices=("vllm", "local"), default="vllm", help="engine of our side: vLLM, or our own engine"
    )
    parser.add_argument("--overlap", type=int, default=0, help="rollout.overlap: stages that decoding may run ahead")
    options = parser.parse_args()
    if options.engines is not None and options.engines < 2:
        parser.error(f"--engines is {options.engines}; expected 2 or more, because the comparison is with one engine")
    from record import surroundings

    from marsrl.trainer.models.init_model import init_model

    other_name, compare = "bare", over_bare
    if options.engines is not None:
        other_name, compare = "one engine", over_one_engine
    before = surroundings("cpu")
    with tempfile.TemporaryDirectory() as folder:
        model_dir = options.model.resolve() if options.model else Path(folder) / "model"
        if not options.model:
            init_model("cpu_default", "arithmetic", model_dir, seed=0, dtype="float32")
        stage = stage_settings(options, model_dir, Path(folder))
        rows = measured(compare(str(model_dir), stage, options), "ours", other_name)
    if options.json:
        record = {
            **before,
            "load_after": os.getloadavg()[0],
            "model": str(options.model or "cpu_default, random"),
            "dtype": options.dtype,
            "engine": options.engine,
            "engines": options.engines,
            "overlap": options.overlap,
            "over": other_name,
            "turns": rows,
        }
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    show_ratio(rows, "ours", other_name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
