"""The process above tritonserver: it detects a dead model, and stops the server without losing a request.

    triton_supervisor ── tritonserver ── the model's processes

Triton still answers "ready" when the process of a Python model has been killed, and on SIGTERM it waits for idle
connections and not for requests. The supervisor therefore watches the processes, probes for decode steps, and drains
through Triton's repository API before it forwards the SIGTERM. In the container it is process 1; `triton_local` runs
the same code in its guard. Standard library only, with `triton_llama.health`, which is standard library only too.
"""
