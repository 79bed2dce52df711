"""In the place of Python: what it is told to run comes from a server of server.py, where there is one for it.

Its text is copied to FOLDER/python, behind a line that names the real Python, which runs it without site-packages. torchrun
and marsrl lie beside it.
"""

import json
import os
import signal
import socket
import struct
import sys

MODULES = {"torchrun": "torch.distributed.run", "marsrl": "marsrl.trainer.cli"}  # of the commands that pip writes
# those of benchmarks that take marsrl from where it is installed, and start each other with their sys.executable
SCRIPTS = ("/trainer/main.py", "/benchmarks/train_step.py", "/benchmarks/step_parts.py", "/benchmarks/parity.py")
FOLDER = os.path.dirname(os.path.abspath(__file__))
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def chosen(words):
    """(which server, the words for it, variables to add to the environment), or None: none."""
    rest = list(words)
    while rest and rest[0].startswith(("-u", "-B", "-W")):
        del rest[: 1 + (rest[0] == "-W")]
    if rest[:1] == ["-m"] and rest[1] in MODULES.values():
        return "trainer", words, {}
    if rest[:2] == ["-m", "vllm.model_executor.models.registry"]:
        return "engine", words, {}  # an engine asks it about its model
    program = rest[0] if rest else ""
    if program.endswith("/ray/_private/workers/setup_worker.py"):
        # it would put the variables into its environment, and then become what its other words say
        context = "--serialized-runtime-env-context="
        contexts = [word.removeprefix(context) for word in rest if word.startswith(context)]
        variables = json.loads(contexts[0])["env_vars"] if contexts else {}
        others = [word for word in rest[1:] if not word.startswith((context, "--language="))]
        return "engine" if "VLLM_LOGGING_LEVEL" in variables else "trainer", others, variables
    if program.endswith("/tests/megatron/vllm_scores.py"):
        return "engine", words, {}
    if program.endswith(SCRIPTS) or "/tests/integration/" in program:
        return "trainer", words, {}
    is_code = program == "-c" and "multiprocessing" not in rest[1]  # which hands on files
    if is_code or "benchmarks/" in program or rest[:2] == ["-m", "pytest"]:
        return "torch", words, {}
    return None


def ask(kind, words, variables):
    """The exit status of what the server has forked; None where it would not."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(os.path.join(FOLDER, kind))
    except OSError:
        return None
    order = json.dumps([words, {**os.environ, **variables}, os.getcwd()]).encode()
    early = []
    for number in FORWARDED:  # until there is somebody to pass it on to
        signal.signal(number, lambda number, _: early.append(number))
    socket.send_fds(server, [struct.pack("i", len(order))], [0, 1, 2])
    server.sendall(order)
    pid = answer(server)
    if not pid:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        return None
    with open("/proc/self/comm", "w") as name:
        name.write(f"forked {pid}")  # see forked.descendants
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    for number in early:
        os.kill(pid, number)
    return answer(server)


def answer(server):
    told = server.recv(4)
    if not told:
        sys.exit("the server that forks for the tests has ended")
    return struct.unpack("i", told)[0]


if __name__ == "__main__":
    name = os.path.basename(sys.argv[0])
    words = ["-m", MODULES[name], *sys.argv[1:]] if name in MODULES else sys.argv[1:]
    place = chosen(words)
    status = ask(*place) if place is not None else None
    if status is None:
        os.execv(sys.executable, [sys.executable, *words])
    if status < 0:  # ended by a signal: so do we
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    sys.exit(status)
