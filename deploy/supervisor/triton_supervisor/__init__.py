"""The process above tritonserver: it starts a dead server again, and stops one without losing a request.

    triton_supervisor ── tritonserver ── the model's processes

Triton still answers "ready" when the process of a Python model has been killed, and on SIGTERM it waits for idle
connections and not for requests. The supervisor therefore watches the processes, probes for decode steps, starts a dead
server again within bounds, and drains through Triton's repository API before it ends the server. In the container it is
process 1; `triton_local` starts the same program. It needs psutil, which comes with accelerate.
"""
