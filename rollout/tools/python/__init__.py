"""The tool `python`: runs code that a model wrote, in a sandbox that is made for one call and thrown away.

launcher.py     how a process is started apart: bubblewrap, or plainly; which of them this machine allows
guest.py        the program inside: limits itself, reads one snippet, runs it, ends
seccomp.py      the system calls that it may not make
interpreter.py  one such process, from its start to its end
tool.py         the tool: interpreters started ahead, one for each call
"""
