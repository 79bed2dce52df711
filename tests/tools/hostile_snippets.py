# ruff: noqa: E501 - a snippet stays on its row
"""Hostile code that a model may write. Each snippet says what it could do.

`attempt(call, ...)` is defined before every snippet: it prints `refused NAME` for an error, and DONE if the call was allowed.
PORT, ABSTRACT, FOLDER, PID and NR_<name> stand for a server on the host's loopback, an abstract unix socket, a world-writable
folder, the process that runs the tests, and the number of a system call.
"""

from __future__ import annotations

from typing import NamedTuple

PRELUDE = """
def attempt(call, *arguments, **keywords):
    try:
        result = call(*arguments, **keywords)
    except BaseException as error:
        print("refused", type(error).__name__)
    else:
        print("DONE", repr(result)[:100])
import ctypes, os, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*words):
    if libc.syscall(*words) == -1: raise OSError(ctypes.get_errno(), "refused")
"""
REFUSED = r"\A(refused \w+\n?)+\Z"  # every attempt is refused
STOPPED = r"\[(stopped|killed): it "
SURVIVED = r"\bsurvived\b"


class Snippet(NamedTuple):
    """Snippet of hostile code. says: pattern of its output."""

    name: str
    code: str
    says: str = REFUSED


SNIPPETS = (
    # processes
    Snippet("fork bomb", "while True:\n    os.fork()", r"BlockingIOError"),
    Snippet("fork bomb that goes on", "while True:\n    try: os.fork()\n    except OSError: pass", STOPPED),
    Snippet("shell fork bomb", "subprocess.run(['sh', '-c', ':(){ :|:& };:'])\nprint('survived')", SURVIVED),
    Snippet("thread bomb", "import threading\nfor _ in range(1000): threading.Thread(target=time.sleep, args=(1e6,)).start()", "can't start new thread"),
    Snippet("daemon", "os.fork() or (os.fork() or time.sleep(1e6))\nprint('survived')", SURVIVED),
    Snippet("daemon of its own session", "attempt(os.setsid); attempt(os.setpgid, 0, 0)"),
    Snippet("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)\nprint('woken')", STOPPED + "|woken"),
    Snippet("signals to all", "try: os.kill(-1, 9)\nexcept OSError: pass\nprint('survived')", SURVIVED),
    Snippet("signals to the trainer", "attempt(os.kill, PID, 9)"),
    Snippet("other processes", "print(len([p for p in os.listdir('/proc') if p.isdigit()]))", r"\A[123]\Z"),
    Snippet("real-time priority", "attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))"),
    # memory
    Snippet("memory bomb", "held = []\nwhile True: held.append(bytearray(1 << 20))", "MemoryError|" + STOPPED),
    Snippet("locked memory", "buffer = ctypes.create_string_buffer(1 << 20)\nprint(libc.mlock(buffer, 1 << 20))", r"\A-1\Z"),
    Snippet("memory of System V", "attempt(syscall, NR_shmget, 0, 1 << 20, 0o1600)"),
    Snippet("memory without a name", "attempt(os.memfd_create, 'x')"),
    Snippet("zip bomb", "import zlib\npacker = zlib.compressobj()\nsmall = b''.join(packer.compress(bytes(1 << 20)) for _ in range(600)) + packer.flush()\nlen(zlib.decompress(small))", "MemoryError|" + STOPPED),
    Snippet("JSON that is deep", "import json\njson.loads('[' * 10 ** 6)", "RecursionError"),
    # attacks on time limits and on the interpreter itself
    Snippet("endless loop", "while True: pass", STOPPED),
    Snippet("closes its output and sleeps", "os.close(1); os.close(2); time.sleep(1e6)", STOPPED),
    Snippet("recursion in C", "sys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(10 ** 6): x = [x]\nprint(len(repr(x)))", "SIGSEGV|MemoryError|" + STOPPED),
    Snippet("null pointer", "ctypes.string_at(0)", "SIGSEGV"),
    Snippet("ends at once", "os._exit(7)", r"\A\[no output\]\Z"),
    Snippet("an error that cannot be shown", "class E(Exception):\n    def __str__(self): raise self\nraise E", "E"),
    Snippet("a value that cannot be shown", "class V:\n    def __repr__(self): raise SystemExit('survived')\nV()", SURVIVED),
    Snippet("limits raised", "import resource\nfor limit in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):\n    attempt(resource.setrlimit, limit, (-1, -1))"),
    # output
    Snippet("endless output", "while True: print('spam' * 1000)", STOPPED + "printed"),
    Snippet("ANSI and bidi", "print('\\x1b[2J\\x1b]0;title\\x07 \\u202eevil\\u2066 \\x9b31m \\u200b \\r\\x08')", r"\A\\x1b\[2J\\x1b\]0;title\\x07 \\u202eevil\\u2066 \\x9b31m \\u200b \\r\\x08\Z"),
    Snippet("no UTF-8", "os.write(1, b'\\xff\\xfe\\x00\\xed\\xa0\\x80survived')\nprint('\\ud800')", SURVIVED),
    Snippet("a forged end", "os.write(1, b'ready\\n{\"status\": 0}\\n')\nos.write(0, b'x') if False else print('survived')", SURVIVED),
    Snippet("the line to the host", "for fd in range(3, 20):\n    try: os.write(fd, b'\\x00' * 10)\n    except OSError: pass\nprint('survived')", r"survived|\[no output\]"),
    # files
    Snippet("passwords", "attempt(open, '/etc/passwd'); attempt(open, '/etc/shadow'); attempt(os.listdir, '/etc/ssl')"),
    Snippet("its own program and marsrl", "import importlib\nattempt(importlib.import_module, 'marsrl'); attempt(os.listdir, 'FOLDER')"),
    Snippet("environment", "print(sorted(set(os.environ) - {'HOME', 'PATH', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE', 'PWD', 'OLDPWD', 'SHLVL', '_'}))", r"\A\[\]\Z"),
    Snippet("environments of others", "import glob\nfor path in glob.glob('/proc/[0-9]*/environ'):\n    try: print('CANARY' in open(path, errors='replace').read())\n    except OSError: print(False)", r"\A(False\n?)+\Z"),
    Snippet("writing to the system", "for path in ('/usr/x', '/etc/x', '/bin/x', '/x', '/dev/x', '/proc/x'): attempt(open, path, 'w')"),
    Snippet("writing to its interpreter", "import json\nattempt(open, json.__file__, 'a'); attempt(os.rename, sys.executable, '/tmp/x')"),
    Snippet("writing outside", "attempt(open, 'FOLDER/canary', 'w'); attempt(os.remove, 'FOLDER/canary')"),
    Snippet("a link outside", "os.chdir('/tmp')\nos.symlink('FOLDER/canary', 'link')\nattempt(open, 'link', 'w'); attempt(open, 'link')"),
    Snippet("the root of others", "import glob\nfor root in glob.glob('/proc/*/root'): attempt(open, root + 'FOLDER/canary')"),
    Snippet("out of a chroot", "attempt(os.chroot, '/tmp')"),
    Snippet("a disk", "attempt(os.mknod, '/tmp/disk', 0o60666, os.makedev(8, 0)); attempt(open, '/dev/sda'); attempt(open, '/dev/mem'); attempt(open, '/dev/kmsg')"),
    Snippet("a file that fills the disk", "file = open('/tmp/x', 'wb')\nfor _ in range(100): file.write(bytes(1 << 20))", "File too large|No space left"),
    Snippet("files that stay open", "held = []\nwhile True: held.append(open('/dev/null'))", "Too many open files"),
    Snippet("inotify", "attempt(syscall, NR_inotify_init1, 0)"),
    # the kernel
    Snippet("settings of the kernel", "for path in ('/proc/sys/kernel/core_pattern', '/proc/sys/kernel/hostname', '/proc/sysrq-trigger', '/sys/kernel/uevent_helper'): attempt(open, path, 'w')"),
    Snippet("memory of the kernel", "attempt(open, '/proc/kcore', 'rb'); attempt(open, '/proc/kmsg')"),
    Snippet("memory of its parent", "parent = os.getppid()\nattempt(open, f'/proc/{parent}/mem', 'r+b'); attempt(os.readlink, f'/proc/{parent}/exe')"),
    Snippet("the signal at its parent's end", "attempt(lambda: syscall(NR_prctl, 1, 0, 0, 0, 0))"),
    Snippet("spared when memory runs out", "attempt(lambda: os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000'))"),
    Snippet("ptrace", "attempt(syscall, NR_ptrace, 16, os.getppid(), 0, 0)"),
    Snippet("new namespaces", "attempt(syscall, NR_unshare, 0x10000000); attempt(subprocess.run, ['unshare', '-Ur', 'true'], check=True, stderr=-3)"),
    Snippet("a clone in a new namespace", "attempt(syscall, NR_clone, 0x10000011, 0, 0, 0, 0)"),
    Snippet("mount", "attempt(subprocess.run, ['mount', '-t', 'tmpfs', 'x', '/tmp'], check=True, stderr=-3)\nprint('refused', libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0))", r"\Arefused \w+\nrefused -1\Z"),
    Snippet("root by setuid", "attempt(os.setuid, 0 if os.getuid() else 1); attempt(subprocess.run, ['su', '-c', 'true'], check=True, stderr=-3, stdin=-3)"),
    Snippet("a program with setuid", "import shutil\nshutil.copy('/usr/bin/id', '/tmp/id'); os.chmod('/tmp/id', 0o6755)\nrun = lambda path: subprocess.run([path], capture_output=True).stdout\nprint('refused' if run('/tmp/id') == run('/usr/bin/id') else 'DONE')", r"\Arefused\Z"),
    Snippet("the host's name", "attempt(socket.sethostname, 'x')"),
    Snippet("calls of 32 bit", "import mmap\npage = mmap.mmap(-1, 4096, prot=7)\npage.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3' if os.uname().machine == 'x86_64' else b'')\nctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()", "SIGSYS|SIGSEGV|SIGILL"),
    Snippet("a call that is newer than the filter", "attempt(syscall, 444, 0, 0, 1)"),  # a call of Landlock
    Snippet("filter and privileges", "print('Seccomp:\\t2' in open('/proc/self/status').read(), 'NoNewPrivs:\\t1' in open('/proc/self/status').read())", r"True True\Z"),
    # the network
    Snippet("sockets of every family", "for family in range(1, 46):\n    for kind in (1, 2, 3): attempt(socket.socket, family, kind)"),
    Snippet("a service on the loopback", "attempt(socket.create_connection, ('127.0.0.1', PORT), 2); attempt(socket.create_connection, ('localhost', PORT), 2)"),
    Snippet("an abstract socket", "def reach():\n    one = socket.socket(socket.AF_UNIX); one.connect('\\0ABSTRACT')\nattempt(reach)"),
    Snippet("names", "attempt(socket.getaddrinfo, 'example.com', 80)"),
    Snippet("interfaces", "print([line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]])", r"\A\['lo'(, '\w*tun\w*'|, '\w*gre\w*'|, 'sit0'|, 'ip6\w+'|, 'ip_vti0')*\]\Z"),
)  # fmt: skip
