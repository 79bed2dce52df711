// Version of the C interface between csrc/ and kernels/library.py. Raise it with every change of a signature or struct.
#pragma once
#define MARSRL_ABI_VERSION 19
