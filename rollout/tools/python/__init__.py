"""The tool `python`: runs a model's code in a sandbox that is created for one call and discarded.

launcher.py     starts isolated processes by bubblewrap
guest.py        the program inside: limits itself, reads one snippet, runs it, ends
seccomp.py      the system calls that it may not make
interpreter.py  one such process, from its start to its end
tool.py         the tool: interpreters started ahead, one for each call
"""
