"""How large the stacks of tritonserver's threads are: large enough that a request's body can't overflow them.

Triton's HTTP library (libevhtp) takes a body of the content type application/x-www-form-urlencoded, which is what curl
sends by default, for a query, and parses it in two buffers of the body's size on a thread's stack. Triton before 25.07
puts 16 bytes there for every chunk of a chunked body (CVE-2025-23310). At the usual 8 MiB, a form of 4.2 MB is signal
11. At 64 MiB, which is also what NVIDIA recommends for its containers, it takes a form of more than 32 MB, or four
million chunks: more than a proxy with a limit on bodies lets through. Stacks are virtual memory; nothing is used up
before it is written to.

Knows nothing about Triton's options.
"""

from __future__ import annotations

import resource

STACK_BYTES = 64 * 2**20


def set_stack_limit() -> int:
    """Make STACK_BYTES the size of thread stacks in processes that this one starts from now on; return what it is.

    It is less where the hard limit is. "Unlimited" is replaced too: there the C library makes stacks of 2 MiB.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    size = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (size, hard))
    return size
