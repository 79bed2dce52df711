"""System calls denied to code in the sandbox, as a kernel filter (seccomp, classic BPF).

Each denied call could break out of the sandbox, reach other processes, use an often attacked part of the kernel, or allocate
memory outside a process's limits (shmget, mq_open, memfd_create). The table is written without libseccomp: call numbers below 424
differ by architecture, and those from 424 on are the same everywhere. Newer calls, with numbers above _LAST, are all denied. A
denied call fails with EPERM, or with ENOSYS if the C library then falls back to an older call.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

_BOTH: tuple[tuple[str, int, int], ...] = (  # name, number on x86-64, number on aarch64
    ("acct", 163, 89),
    ("add_key", 248, 217),
    ("adjtimex", 159, 171),
    ("bpf", 321, 280),
    ("chroot", 161, 51),
    ("clock_adjtime", 305, 266),
    ("clock_settime", 227, 112),
    ("delete_module", 176, 106),
    ("fanotify_init", 300, 262),
    ("finit_module", 313, 273),
    ("init_module", 175, 105),
    ("inotify_init1", 294, 26),  # the host limits these per user, across all sandboxes
    ("io_setup", 206, 0),
    ("kcmp", 312, 272),
    ("kexec_file_load", 320, 294),
    ("kexec_load", 246, 104),
    ("keyctl", 250, 219),
    ("lookup_dcookie", 212, 18),
    ("mbind", 237, 235),
    ("memfd_create", 319, 279),
    ("migrate_pages", 256, 238),
    ("mknodat", 259, 33),
    ("mount", 165, 40),
    ("move_pages", 279, 239),
    ("mq_open", 240, 180),
    ("msgget", 68, 186),
    ("name_to_handle_at", 303, 264),
    ("open_by_handle_at", 304, 265),
    ("perf_event_open", 298, 241),
    ("personality", 135, 92),
    ("pivot_root", 155, 41),
    ("process_vm_readv", 310, 270),
    ("process_vm_writev", 311, 271),
    ("ptrace", 101, 117),
    ("quotactl", 179, 60),
    ("reboot", 169, 142),
    ("request_key", 249, 218),
    ("semget", 64, 190),
    ("set_mempolicy", 238, 237),
    ("setdomainname", 171, 162),
    ("sethostname", 170, 161),
    ("setns", 308, 268),
    ("setpgid", 109, 154),  # denied together with setsid: keeps a snippet's processes in one process group
    ("setsid", 112, 157),
    ("settimeofday", 164, 170),
    ("shmget", 29, 194),
    ("socket", 41, 198),
    ("swapoff", 168, 225),
    ("swapon", 167, 224),
    ("syslog", 103, 116),
    ("umount2", 166, 39),
    ("unshare", 272, 97),
    ("userfaultfd", 323, 282),
    ("vhangup", 153, 58),
    ("vmsplice", 278, 75),
)
_ONLY_X86 = (
    ("inotify_init", 253),
    ("ioperm", 173),
    ("iopl", 172),
    ("mknod", 133),
    ("modify_ldt", 154),
    ("uselib", 134),
    ("ustat", 136),
)
_NEW = (  # calls from 424 on, with the same number on every architecture
    ("io_uring_setup", 425),
    ("io_uring_enter", 426),
    ("io_uring_register", 427),
    ("open_tree", 428),
    ("move_mount", 429),
    ("fsopen", 430),
    ("fsconfig", 431),
    ("fsmount", 432),
    ("fspick", 433),
    ("clone3", 435),  # denied because its flags are in memory, which a filter cannot read
    ("pidfd_getfd", 438),
    ("process_madvise", 440),
)
_LAST = 441  # epoll_pwait2, the newest allowed call
_AS_MISSING = frozenset({"clone3"})  # ENOSYS: the C library then calls clone

_NEW_NAMESPACES = 0x7E020080  # flags CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME
_SET_PDEATHSIG = 1
_MACHINES = {  # the kernel's architecture id, the column of _BOTH, the numbers of clone, socketpair and prctl
    "x86_64": (0xC000003E, 1, 56, 53, 157),
    "aarch64": (0xC00000B7, 2, 220, 199, 167),
}

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # SECCOMP_RET_ALLOW, KILL_PROCESS, ERRNO
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # BPF: ld [k], jeq, jgt, jset, ret
_NR, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data, in bytes; the last: lower half of the first argument


def denied_calls(machine: str) -> dict[str, int]:
    """Return {name: number} of the calls that are denied with any arguments. machine: as in platform.machine()."""
    column = _MACHINES[machine][1]
    calls = {row[0]: int(row[column]) for row in _BOTH} | dict(_NEW)
    return calls | dict(_ONLY_X86) if machine == "x86_64" else calls


def seccomp_filter() -> bytes:
    """Return the filter, 8 bytes per instruction. Raises OSError if the architecture is not in the table."""
    machine = platform.machine()
    if machine not in _MACHINES:
        raise OSError(f"{machine} has no seccomp filter; expected {' or '.join(_MACHINES)}")
    arch, _, clone, socketpair, prctl = _MACHINES[machine]
    refused, missing = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),  # 32-bit calls have other numbers
        (_LOAD, 0, 0, _NR),
    ]
    for name, number in denied_calls(machine).items():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, missing if name in _AS_MISSING else refused)]
    program += [(_ABOVE, 0, 1, _LAST), (_RETURN, 0, 0, missing)]  # includes x32's numbers, from 1 << 30 on
    program += [(_EQUAL, 0, 4, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    program += [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, refused), (_RETURN, 0, 0, _ALLOW)]
    # Code in the sandbox must not revoke the signal at its parent's death.
    program += [(_EQUAL, 0, 4, prctl), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    program += [(_EQUAL, 0, 1, _SET_PDEATHSIG), (_RETURN, 0, 0, refused), (_RETURN, 0, 0, _ALLOW)]
    program += [(_EQUAL, 0, 3, socketpair), (_LOAD, 0, 0, _FIRST_ARGUMENT)]  # asyncio needs socketpair
    program += [(_EQUAL, 1, 0, socket.AF_UNIX), (_RETURN, 0, 0, refused), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
