"""Worker that plays a program's sessions. It needs only the standard library (Python 3.9 or later), so it runs on any host.

    python worker.py --url http://HOST:PORT --function my_agent.py:run        key: environment variable MARSRL_WORKER_KEY
    python worker.py --url http://HOST:PORT --environment my_env.py:Env
    python worker.py --url http://HOST:PORT --command python my_agent.py

A function is called with the problem and a client, once per session; sessions run concurrently, each in a thread, or
as a task if the function is async. A command is started once per session, with the problem as JSON on its standard input, and
OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and MARSRL_KEYED_URL in its environment. If the last
line that the command prints is JSON, it is used like a function's return value:

    None             the task judges the session's last answer
    "a text"         the task judges this answer
    0.5              the reward of every agent
    {"solver": 1.0}  rewards by agent, by id of an answer (`chatcmpl-...`), or by name of a lineage
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import importlib.util
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

UNUSABLE = 78
"""Exit code of a worker that cannot load its function, environment or command (EX_CONFIG)."""
_LONGEST_S = 24 * 3600.0  # maximum duration of a call; the gateway keeps its connection alive
_RETRY_S = 1.0
_MOST_SHOWN = 4000  # characters kept of an error


class Client:
    """A session, as the user's function sees it.

    base_url, api_key: for any OpenAI or Anthropic client. keyed_url: URL that contains the key, for a client that takes no key.
    agents: names to send as the model.
    """

    def __init__(self, base_url: str, api_key: str, session: str, agents: list[str]) -> None:
        self.base_url, self.api_key, self.session, self.agents = base_url, api_key, session, agents
        self.keyed_url = f"{base_url[: -len('/v1')]}/s/{api_key}/v1"

    def chat(self, agent: str, messages: Any, headers: dict[str, str] | None = None, **more: Any) -> SimpleNamespace:
        """Call the agent through /v1/chat/completions; returns id, message (a dict to append to the messages), text, finish.

        messages: a list of messages, in which a string is a user turn; or a single message or string. headers: additional
        request headers, such as X-Marsrl-Lineage.
        """
        given = [messages] if isinstance(messages, (str, dict)) else messages
        turns = [{"role": "user", "content": each} if isinstance(each, str) else each for each in given]
        body = {"model": agent, "messages": turns, **more}
        reply = _request(f"{self.base_url}/chat/completions", self.api_key, body, _LONGEST_S, headers)
        choice = reply["choices"][0]
        message = {name: value for name, value in choice["message"].items() if value is not None}
        return SimpleNamespace(
            id=reply["id"], message=message, text=message.get("content") or "", finish=choice["finish_reason"]
        )

    async def achat(self, agent: str, messages: Any, *given: Any, **more: Any) -> SimpleNamespace:
        """Call the agent as `chat` does, in an async function."""
        return await asyncio.get_running_loop().run_in_executor(
            None, lambda: self.chat(agent, messages, *given, **more)
        )

    def openai(self, **options: Any) -> Any:
        """Return an openai.OpenAI for this session, if installed."""
        import openai

        return openai.OpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    def async_openai(self, **options: Any) -> Any:
        """Return an openai.AsyncOpenAI for this session."""
        import openai

        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)


class _Connections(threading.local):
    """Open connections of each thread, by server. Calls from one thread to a server share a connection."""

    def __init__(self) -> None:
        self.by_server: dict[tuple[str, str], http.client.HTTPConnection] = {}


_CONNECTIONS = _Connections()


def _request(
    url: str, key: str, body: dict[str, Any] | None, timeout_s: float, more: dict[str, str] | None = None
) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {**(more or {}), "authorization": f"Bearer {key}", "content-type": "application/json"}
    scheme, server, *parts = urllib.parse.urlsplit(url)
    is_kept = (connection := _CONNECTIONS.by_server.pop((scheme, server), None)) is not None
    if connection is None:
        of_scheme = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        connection = of_scheme(server, timeout=timeout_s)
    elif connection.sock is not None:
        connection.sock.settimeout(timeout_s)
    method = "GET" if data is None else "POST"
    try:
        connection.request(method, urllib.parse.urlunsplit(("", "", *parts)), data, headers)
        reply = connection.getresponse()
        reply_body = reply.read()
    except BaseException as error:
        connection.close()
        if is_kept and isinstance(error, ConnectionError):  # the server may have closed an idle connection
            return _request(url, key, body, timeout_s, more)
        raise
    _CONNECTIONS.by_server[scheme, server] = connection
    if reply.status >= 500:
        raise ConnectionError(f"HTTP {reply.status} of {url}")  # a gateway error, such as at the end of the run
    if reply.status >= 400:
        raise RuntimeError(f"HTTP {reply.status} of {url}: {reply_body.decode(errors='replace')[:_MOST_SHOWN]}")
    return json.loads(reply_body)


class Worker:
    """Worker that polls for sessions and plays them concurrently. Polling is also its heartbeat."""

    def __init__(self, url: str, key: str, name: str, most: int, play: Callable[..., Any]) -> None:
        self._url, self._key, self._name, self._most, self._play = url.rstrip("/"), key, name, most, play
        self._lock = threading.Lock()  # guards _open
        # Functions that end running sessions, by key.
        self._open: dict[str, Callable[[], Any]] = {}
        self._loop = asyncio.new_event_loop()  # event loop for async functions
        self._loop.set_default_executor(ThreadPoolExecutor(4 * most))
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, is_wanted: Callable[[], bool]) -> None:
        while is_wanted():
            try:
                news = _request(f"{self._url}/next?worker={self._name}&most={self._most}", self._key, None, 60.0)
            except (OSError, ValueError, http.client.HTTPException):  # the run has ended, or has not begun
                time.sleep(_RETRY_S)
                continue
            for given in news["sessions"]:
                self._open[given["api_key"]] = lambda: None
                threading.Thread(target=self._session, args=(given,), daemon=True).start()
            for key in news["over"]:
                with self._lock:
                    end = self._open.pop(key, lambda: None)
                end()

    def end(self) -> None:
        for end in list(self._open.values()):
            end()

    def _ends_by(self, key: str, end: Callable[[], Any]) -> None:
        """Register `end`, which ends a running session; call it at once if the session is already over."""
        with self._lock:
            is_over = key not in self._open
            if not is_over:
                self._open[key] = end
        if is_over:
            end()

    def _session(self, given: dict[str, Any]) -> None:
        key = given["api_key"]
        try:
            client = Client(f"{self._url}/v1", key, given["session"], given["agents"])
            returned = self._play(SimpleNamespace(**given["problem"]), client, lambda end: self._ends_by(key, end))
            if inspect.iscoroutine(returned):
                task = asyncio.run_coroutine_threadsafe(returned, self._loop)
                self._ends_by(key, task.cancel)
                returned = task.result()
            report = _as_end(returned)
        except BaseException as error:
            report = {"error": _told(error)[-_MOST_SHOWN:]}
        if self._open.pop(key, None) is None:
            return  # already ended
        for _ in range(60):
            try:
                _request(f"{self._url}/end", key, report, 60.0)
                return
            except RuntimeError:  # the session is over
                return
            except (OSError, http.client.HTTPException):
                time.sleep(_RETRY_S)


def _told(error: BaseException) -> str:
    """Format an error with its traceback, without frames of this file."""
    whole = traceback.TracebackException.from_exception(error)
    own = [frame for frame in whole.stack if frame.filename != _told.__code__.co_filename]
    whole.stack = traceback.StackSummary.from_list(own)
    return "".join(whole.format() if own else whole.format_exception_only())


def _as_end(returned: Any) -> dict[str, Any]:
    """Convert a function's return value to the body of POST /end."""
    if isinstance(returned, _Played):
        return {**_as_end(returned.end), "turn_rewards": returned.turn_rewards}
    if returned is None:
        return {}
    if isinstance(returned, str):
        return {"answer": returned}
    if isinstance(returned, dict):
        return {"rewards": {str(name): float(value) for name, value in returned.items()}}
    if isinstance(returned, (tuple, list)):
        raise ValueError(
            f"the program returned {returned!r:.200}; expected nothing, a text, a number or {{name: number}}"
        )
    return {"reward": float(returned)}


class _Played:
    """Result of an environment. end: value that ended it. turn_rewards: {id of an answer: reward of the turn}."""

    def __init__(self, end: Any, turn_rewards: dict[str, float]) -> None:
        self.end, self.turn_rewards = end, turn_rewards


def function_of(name: str) -> Callable[..., Any]:
    """Return a callable that plays a session by calling FILE.py:FUNCTION."""
    function = _attribute(name)
    return lambda problem, client, on_end: function(problem, client)


def environment_of(name: str) -> Callable[..., Any]:
    """Return a callable that plays a session in an environment: a new object of FILE.py:CLASS.

        reset(problem) -> messages     to the only agent; or {agent: messages}: the first agent acts, all get their messages;
                                       problem.agents: the agents' names
        step(text) -> messages         to the agent that wrote the text; or {agent: messages}, as above
                   -> messages, -0.1   the same, and a reward for the turn that wrote the text, added to its agent's reward
                   -> 0.5              the end, with every agent's reward; or {agent: 1.0}; or None: the task judges
        close()                        optional: called when the session has ended or failed
        max_tokens                     optional: maximum tokens of a turn

    messages: a string, which is a user turn, or a list of strings and of messages as in OpenAI's API.
    """
    kind = _attribute(name)

    def play(problem: SimpleNamespace, client: Client, on_end: Callable[..., None]) -> Any:
        environment = kind()
        try:
            return _played(environment, problem, client)
        finally:
            getattr(environment, "close", lambda: None)()

    return play


def _played(environment: Any, problem: SimpleNamespace, client: Client) -> _Played:
    """Play an environment to its end. Each agent has its own chat."""
    problem.agents = client.agents
    chats: dict[str, list[Any]] = {agent: [] for agent in client.agents}
    agent = client.agents[0] if len(client.agents) == 1 else None
    most = getattr(environment, "max_tokens", None)
    turn_rewards: dict[str, float] = {}
    heard = environment.reset(problem)
    while not _is_end(heard):
        if not isinstance(heard, dict):
            if agent is None:
                raise ValueError(
                    f"reset returned {heard!r}; expected {{agent: messages}} with agents {', '.join(chats)}"
                )
            heard = {agent: heard}
        for name, messages in heard.items():
            if name not in chats:
                raise ValueError(f"the environment names the player {name!r}; expected one of {', '.join(chats)}")
            chats[name] += [messages] if isinstance(messages, str) else messages
        agent = next(iter(heard))
        if heard[agent] == []:
            raise ValueError(
                f"the environment has no message for {agent}, who acts next; return messages, or end with a number or None"
            )
        reply = client.chat(agent, chats[agent], max_tokens=most)
        chats[agent].append(reply.message)
        heard = environment.step(reply.text)
        if isinstance(heard, tuple):
            if len(heard) != 2:
                raise ValueError(
                    f"step returned {heard!r}; expected messages, or a pair of messages and the turn's reward"
                )
            heard, turn_rewards[reply.id] = heard[0], float(heard[1])
    return _Played(heard, turn_rewards)


def _is_end(heard: Any) -> bool:
    """Return True for rewards, False for messages."""
    values = heard.values() if isinstance(heard, dict) else [heard]
    return not any(isinstance(each, (str, list)) for each in values)


def _attribute(name: str) -> Callable[..., Any]:
    """Load the function or class named by FILE.py:NAME, with its folder on sys.path."""
    file, _, attribute = name.rpartition(":")
    path = os.path.abspath(file)
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("marsrl_program", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise ValueError(f"no Python file {file}; expected FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{file} has no callable {attribute}")
    return function


class Groups:
    """Process groups that a guard process kills once this process has ended for any reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guard = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--guard"], stdin=subprocess.PIPE, start_new_session=True
        )

    def tell(self, sign: str, group: int) -> None:
        """Register (sign +) or remove (-) a group."""
        assert self._guard.stdin is not None
        with self._lock:
            self._guard.stdin.write(f"{sign}{group}\n".encode())
            self._guard.stdin.flush()


def guard() -> None:
    groups: set[int] = set()
    for line in sys.stdin:  # until the parent has ended
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        _kill(group)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def command_of(words: list[str]) -> Callable[..., Any]:
    """Return a callable that plays a session by running a command in its own process group."""
    if shutil.which(words[0]) is None:
        raise ValueError("no such program; correct the first word of the command")
    groups = Groups()

    def play(problem: SimpleNamespace, client: Client, on_end: Callable[[Callable[[], None]], None]) -> Any:
        server = client.base_url[: -len("/v1")]
        environment = {**os.environ, "OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key}
        environment.update(ANTHROPIC_BASE_URL=server, ANTHROPIC_API_KEY=client.api_key)
        environment["MARSRL_KEYED_URL"] = client.keyed_url
        environment.pop("MARSRL_WORKER_KEY", None)
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True, errors="replace"
        )
        groups.tell("+", process.pid)
        on_end(lambda: _kill(process.pid))
        said, errors = process.communicate(json.dumps(vars(problem)))
        groups.tell("-", process.pid)
        if process.returncode != 0:
            raise RuntimeError(f"{words[0]} ended with code {process.returncode}: {errors[-_MOST_SHOWN:]}")
        # Not splitlines(): JSON strings may contain other line separators, such as U+2028.
        lines = [line for line in said.split("\n") if line.strip()]
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            return None

    return play


def main() -> int:
    parser = argparse.ArgumentParser(description="Plays sessions of a program for a marsrl run.")
    parser.add_argument("--url", default="", help="http://HOST:PORT of the run (external.host, external.port)")
    parser.add_argument("--function", help="FILE.py:FUNCTION")
    parser.add_argument("--environment", help="FILE.py:CLASS")
    parser.add_argument(
        "--command", nargs=argparse.REMAINDER, help="a program and its arguments; must be the last option"
    )
    parser.add_argument("--name", default=f"{os.uname().nodename}-{os.getpid()}", help="unique name of this worker")
    parser.add_argument("--most", type=int, default=64, help="maximum concurrent sessions")
    parser.add_argument("--with-parent", action="store_true", help="end with the parent process")
    parser.add_argument("--check", action="store_true", help="import the function or the environment, and exit")
    parser.add_argument("--guard", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.guard:
        guard()
        return 0
    parent = os.getppid()
    # Modules in this file's folder would shadow packages of the same name, such as `agents` of openai-agents.
    own = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != own]
    try:
        if words.command:
            play = command_of(words.command)
        else:
            play = environment_of(words.environment) if words.environment else function_of(words.function or "")
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        name = words.environment or words.function or (words.command or ["no --function"])[0]
        print(f"{name}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})", file=sys.stderr)
        return UNUSABLE
    if words.check:
        return 0
    worker = Worker(words.url, os.environ.get("MARSRL_WORKER_KEY", ""), words.name, words.most, play)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        worker.run(lambda: not words.with_parent or os.getppid() == parent)
    except (RuntimeError, KeyboardInterrupt) as error:
        print(f"worker {words.name}: {error}", file=sys.stderr)
        return 1
    finally:
        worker.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
