"""Measure samples, tokens and credit of sessions for different ways in which a harness calls its agent.

    python benchmarks/studies/harness_patterns.py [--patterns append_only branches] [--json FILE]

Each pattern plays two sessions of 8 turns through the gateway, with rewards 1 and 0. Answers are made up, and a token is a byte.
Columns:

    fed       tokens that the trainer computes: all tokens of samples with a reward
    once      the same tokens, with a prefix that several samples of a session share counted once
    trained   number of sampled tokens with a gradient, of all sampled tokens
    credit    advantages of the first session's samples, then of the second session's
    why       the reason for the first sample that does not continue an earlier one

If a call is cut off and repeated, either of the two may extend the sample, which differs between runs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import re
import urllib.parse
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from operator import and_, eq
from pathlib import Path
from typing import Any

TURNS = 8
SYSTEM = {"role": "system", "content": "You are a coding agent. " + "Keep to the rules of this repository. " * 8}
TOOL = {"type": "function", "function": {"name": "shell", "description": "Runs a command.", "parameters": {}}}
ANSWER = "<think>I look at step {n}.</think>Step {n}: the parser fails on an empty list, where it expects at least one entry."
CALL = '<tool_call>{{"name": "shell", "arguments": {{"command": "cat part_{n}.py"}}}}</tool_call>'

Chat = list[dict[str, Any]]


def output(turn: int) -> dict[str, Any]:
    return {"role": "user", "content": f"output {turn}: " + "x" * 200}


def begin(problem: Any, system: str = "") -> Chat:
    """Return the chat with which a context begins. system: words that are added to the system prompt."""
    return [{**SYSTEM, "content": SYSTEM["content"] + system}, {"role": "user", "content": problem.question}]


def append_only(problem: Any, client: Any, system: str = "", turns: int = TURNS, **more: Any) -> Chat:
    chat = begin(problem, system)
    for turn in range(turns):
        chat += [client.chat("solver", chat, **more).message, output(turn)]
    return chat


def tool_calls(problem: Any, client: Any, renew: Callable[[Chat, int], None] = lambda chat, turn: None) -> None:
    chat = begin(problem)
    for turn in range(TURNS):
        chat.append(client.chat("caller", chat, tools=[TOOL]).message)
        called = chat[-1]["tool_calls"]
        chat += [{"role": "tool", "tool_call_id": call["id"], "content": output(turn)["content"]} for call in called]
        renew(chat, turn)


def call_ids_made_anew(problem: Any, client: Any) -> None:
    """Every request changes the ids of all earlier calls."""

    def renew(chat: Chat, turn: int) -> None:
        for place, message in enumerate(chat):
            for call in message.get("tool_calls", ()):
                call["id"] = f"call_{turn}_{place}"
            if message["role"] == "tool":
                message["tool_call_id"] = f"call_{turn}_{place - 1}"

    tool_calls(problem, client, renew)


def sub_agents(problem: Any, client: Any) -> None:
    """Every second answer starts a sub-agent with a context of 3 calls, whose last answer is returned to the main agent."""
    chat = begin(problem)
    for turn in range(TURNS):
        chat += [client.chat("solver", chat).message, output(turn)]
        if turn % 2:
            report = append_only(problem, client, f" You are helper {turn}.", 3)[-2]["content"]
            chat[-1] = {"role": "user", "content": report}


def summary(problem: Any, client: Any, every: int = 3) -> None:
    """A summary replaces the history after every third turn."""
    chat = begin(problem)
    for turn in range(TURNS):
        chat += [client.chat("solver", chat).message, output(turn)]
        if turn % every == every - 1 and turn < TURNS - 1:
            told = client.chat("solver", [*chat, {"role": "user", "content": "Summarise your work."}]).text
            chat = [chat[0], {"role": "user", "content": f"{problem.question}\nSo far: {told}"}]


def summaries_in_one_session(problem: Any, client: Any) -> None:
    if client.session.endswith("0"):
        summary(problem, client, every=2)
    else:
        append_only(problem, client)


def old_outputs_dropped(problem: Any, client: Any) -> None:
    """Tool outputs older than two turns become a placeholder."""
    chat = begin(problem)
    for turn in range(TURNS):
        old = [place for place, message in enumerate(chat) if message["content"].startswith("output")][:-2]
        shown = [{**each, "content": "(dropped)"} if place in old else each for place, each in enumerate(chat)]
        chat += [client.chat("solver", shown).message, output(turn)]


def last_three_turns(problem: Any, client: Any) -> None:
    chat = begin(problem)
    for turn in range(TURNS):
        chat += [client.chat("solver", chat[:2] + chat[2:][-6:]).message, output(turn)]


def edited(problem: Any, client: Any, edit: Callable[[str], str]) -> None:
    """The program changes every answer by `edit` before it sends the history again."""
    chat = begin(problem)
    for turn in range(TURNS):
        message = client.chat("solver", chat).message
        chat += [{**message, "content": edit(message["content"])}, output(turn)]


def thoughts_stripped(problem: Any, client: Any) -> None:
    edited(problem, client, lambda text: re.sub("<think>.*</think>", "", text))


def answers_in_another_form(problem: Any, client: Any) -> None:
    edited(problem, client, str.upper)


def clock_in_the_system_prompt(problem: Any, client: Any) -> None:
    chat = begin(problem)
    for turn in range(TURNS):
        now = begin(problem, f"It is 10:0{turn}.")[0]
        chat += [client.chat("solver", [now, *chat[1:]]).message, output(turn)]


def clock_as_the_last_message(problem: Any, client: Any) -> None:
    chat = begin(problem)
    for turn in range(TURNS):
        now = {"role": "user", "content": f"It is 10:0{turn}."}
        chat += [client.chat("solver", [*chat, now]).message, output(turn)]


def branches(problem: Any, client: Any) -> None:
    """After 4 turns, four branches of 2 calls each start at once; one of them continues for 2 more calls."""
    common = append_only(problem, client, turns=4)

    def branch(number: int) -> Chat:
        chat = [*common[:-1], {"role": "user", "content": f"Try way {number}."}]
        for turn in range(2):
            chat += [client.chat("solver", chat).message, output(turn)]
        return chat

    with ThreadPoolExecutor(4) as pool:
        # Wait for all branches: taking only the first result would cancel calls that have not begun.
        chat, *_ = pool.map(branch, range(4))
    for turn in range(2):
        chat += [client.chat("solver", chat).message, output(turn)]


def answer_thrown_away(problem: Any, client: Any) -> None:
    """The seventh request is repeated after its answer was read."""
    chat = append_only(problem, client, turns=6)
    client.chat("solver", chat)
    for turn in range(2):
        chat += [client.chat("solver", chat).message, output(turn)]


def call_cut_off(problem: Any, client: Any) -> None:
    """The client closes the connection of the seventh call, and repeats the call without the header that marks a retry."""
    chat, url = append_only(problem, client, turns=6), urllib.parse.urlsplit(client.base_url)
    connection = http.client.HTTPConnection(url.netloc)
    headers = {"authorization": f"Bearer {client.api_key}", "content-type": "application/json"}
    body = json.dumps({"model": "solver", "messages": chat})
    connection.request("POST", f"{url.path}/chat/completions", body, headers)
    connection.close()
    for turn in range(2):
        chat += [client.chat("solver", chat).message, output(turn)]


PATTERNS = [
    append_only, tool_calls, sub_agents, summary, summaries_in_one_session, old_outputs_dropped, last_three_turns,
    thoughts_stripped, answers_in_another_form, clock_in_the_system_prompt, clock_as_the_last_message, call_ids_made_anew,
    branches, answer_thrown_away, call_cut_off,
]  # fmt: skip


def run(problem: Any, client: Any) -> float:
    """Play a session of the pattern that the environment variable PATTERN names."""
    globals()[os.environ["PATTERN"]](problem, client)
    return float(client.session.endswith("0"))


def num_nodes(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of nodes in the trie of these sequences of tokens."""
    ordered = sorted(map(tuple, sequences))
    shared = sum(sum(accumulate(map(eq, one, other), and_)) for one, other in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def measure(pattern: str, function: str = f"{Path(__file__).resolve()}:run") -> dict[str, Any]:
    """Play the pattern; return a row of the table, and the samples."""
    from marsrl.commands.rehearsal import rehearse  # Late: the program's worker imports this file too.
    from marsrl.trainer.config.read import read_config

    os.environ["PATTERN"] = pattern
    agents = {name: {"policy": "main"} for name in ("solver", "caller")}
    settings = {
        "task": "math", "orchestration": "external", "agents": agents, "policies.main": {"model": "none"},
        "rollout": {"prompts_per_step": 1, "group_size": 2}, "external.function": function,
    }  # fmt: skip
    config, _ = read_config(None, [f"{name}={json.dumps(value)}" for name, value in settings.items()])
    answers = {name: [form.format(n=n) for n in range(200)] for name, form in (("solver", ANSWER), ("caller", CALL))}
    played = rehearse(config, answers, question="Which test fails?", reference="5")
    if played.errors:
        raise SystemExit(f"{pattern}: {next(iter(played.errors.values()))}")
    samples = sorted((s for group in played.credited.groups for s in group.samples), key=lambda s: s.turns[0].call)
    sessions = {name: [s for s in samples if s.episode_id == name] for name in sorted({s.episode_id for s in samples})}
    tokens = {s.uid: [*s.prompt_ids.tolist(), *s.token_ids.tolist()] for s in samples if not s.reward.is_missing}
    fed = sum(map(len, tokens.values()))
    once = sum(num_nodes([tokens[s.uid] for s in own if s.uid in tokens]) for own in sessions.values())
    return {
        "pattern": pattern.replace("_", " "),
        "calls": sum(len(s.turns) for s in samples),
        "samples": len(samples),
        "fed": fed,
        "once": once,
        "trained": sum(int(s.is_sampled.sum()) for s in samples if s.uid in tokens),
        "drawn": sum(turn.end - turn.start for s in samples for turn in s.turns),
        "why": next(iter(Counter(s.rewritten for s in samples if s.rewritten)), ""),
        "credit": [[played.credited.advantages.get(s.uid) for s in own] for own in sessions.values()],
        "played": played,
    }


def line(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    credit = [Counter("none" if each is None else f"{each:+.2f}" for each in session) for session in row["credit"]]
    credit_text = "; ".join(
        ", ".join(f"{number} x {value}" if number > 1 else value for value, number in each.items()) for each in credit
    )
    cells = (
        row["pattern"], f"{row['calls']} -> {row['samples']}", f"{row['fed']:,}", f"{row['once']:,}",
        f"{row['fed'] / row['once']:.2f}", f"{row['trained']:,} of {row['drawn']:,}", credit_text, row["why"],
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [pattern.__name__ for pattern in PATTERNS]
    parser.add_argument(
        "--patterns", nargs="+", choices=names, default=names, metavar="NAME", help="patterns to play (default: all)"
    )
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    print(
        "| pattern | calls -> samples | fed | once | ratio | trained | credit | why |\n|---|---|---|---|---|---|---|---|"
    )
    rows = []
    for pattern in options.patterns:
        rows.append({name: value for name, value in measure(pattern).items() if name != "played"})
        print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
