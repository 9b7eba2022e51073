"""The process above tritonserver: it ends a dead server with its reason, and stops one without losing a request.

    triton_supervisor ── tritonserver ── the model's processes

Triton still answers "ready" when the process of a Python model has been killed, and on SIGTERM it waits for idle
connections and not for requests. The supervisor therefore watches the processes, probes for decode steps, ends with
code 70 when the model is dead, and drains through Triton's repository API before it ends the server. Compose or
Kubernetes starts it again; they and `triton_local` notice the end of the OpenAI endpoint, which has no supervisor. In
the container this is process 1; `triton_local` starts the same program. It needs psutil, which comes with accelerate.
"""
