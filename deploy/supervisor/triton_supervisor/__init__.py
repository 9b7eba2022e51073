"""The process above tritonserver: it sees that the model is dead, and ends the server without losing a request.

    triton_supervisor ── tritonserver ── the model's processes

Triton goes on answering "ready" when the process of a Python model has been killed, and on SIGTERM it waits for idle
connections and not for requests. So this watches the processes and asks for a step, and drains through Triton's own
repository API before it passes the SIGTERM on. In the container it is the first process; `triton_local` runs the same
in its guard. Standard library only, with `triton_llama.health`, which is that too.
"""
