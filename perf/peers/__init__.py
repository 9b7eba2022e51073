"""What people would use instead, beside ours: the same checkpoint, load and machine, each in its best honest settings.

with opened(contestant("vllm"), checkpoint, threads=1) as server:
    server.measure("uniform", Closed(32), count=64, warmup=32, slo=SLO(2.0, 0.1), rates=None)
"""
