"""Which of several Tritons gets a request, and when one that failed gets requests again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from frontend.endpoints import HOST, Endpoint, endpoint
from frontend.fake_triton import FakeTriton, fake_triton
from triton_llama.endpoint import Endpoint as Address
from triton_llama.errors import LlamaConnectionError
from triton_llama_openai.triton.engine_client import EngineClient
from triton_llama_openai.triton.load_balancer import MARGIN, LoadBalancer
from triton_llama_openai.triton.replica import Replica

PREFIXES = [f"prompt {number}" for number in range(64)]


async def _before_return(replica: Replica) -> None:
    raise AssertionError("no replica returns")


def _balancer(replicas: int = 3) -> LoadBalancer:
    addresses = [Address.parse(f"triton-{number}:8001", "grpc") for number in range(replicas)]
    return LoadBalancer([EngineClient(address, "llama") for address in addresses], 0, _before_return)


def _picked(balancer: LoadBalancer, prefix: str) -> Replica:
    replica = balancer.pick(prefix)
    assert replica is not None
    return replica


def _in_a_loop(act: Callable[[], None]) -> None:
    async def run() -> None:
        act()

    asyncio.run(run())


def test_prefixes_are_spread_over_the_replicas() -> None:
    balancer = _balancer()
    homes = [_picked(balancer, prefix) for prefix in PREFIXES]
    assert all(homes.count(replica) > 8 for replica in balancer.replicas)


def test_a_replica_that_fails_moves_its_own_prefixes_only() -> None:
    balancer = _balancer()
    homes = [_picked(balancer, prefix) for prefix in PREFIXES]
    lost = balancer.replicas[0]
    _in_a_loop(lambda: lost.fail(LlamaConnectionError("gone")))
    moved = [_picked(balancer, prefix) for prefix in PREFIXES]
    assert lost not in moved
    assert all(before in (after, lost) for before, after in zip(homes, moved, strict=True))


def test_a_home_that_is_much_busier_than_another_replica_is_passed_over() -> None:
    balancer = _balancer()
    home = _picked(balancer, PREFIXES[0])
    home.running = MARGIN
    assert _picked(balancer, PREFIXES[0]) is home
    home.running += 1
    busy, idle = (replica for replica in balancer.replicas if replica is not home)
    busy.running = 1
    assert _picked(balancer, PREFIXES[0]) is idle


def test_without_a_replica_that_takes_requests_none_is_picked() -> None:
    balancer = _balancer(1)
    _in_a_loop(lambda: balancer.replicas[0].fail(LlamaConnectionError("gone")))
    assert balancer.pick(PREFIXES[0]) is None


def _both(stack: ExitStack, **changes: object) -> tuple[FakeTriton, FakeTriton, Endpoint]:
    first, second = stack.enter_context(fake_triton()), stack.enter_context(fake_triton())
    served = stack.enter_context(endpoint(0, triton=f"{HOST}:{first.port}, {HOST}:{second.port}", **changes))
    served.complete()
    home, other = sorted((first, second), key=lambda triton: -len(triton.requests))
    return home, other, served


def test_a_prompts_home_gets_it_every_time() -> None:
    with ExitStack() as stack:
        home, other, served = _both(stack)
        for _ in range(5):
            served.complete()
        assert (len(home.requests), len(other.requests)) == (6, 0)


def test_requests_beyond_the_margin_go_to_the_least_busy_replica() -> None:
    with ExitStack() as stack:
        home, other, served = _both(stack)
        home.hold_after = other.hold_after = 1
        for _ in range(MARGIN + 4):
            stack.enter_context(served.begin_request("/v1/completions", prompt="Return a list"))
        other.wait_for(lambda _: home.running + other.running == MARGIN + 4)
        assert (home.running, other.running) == (MARGIN + 2, 2)


def test_a_replica_that_failed_gets_requests_once_it_generates_a_token() -> None:
    with ExitStack() as stack:
        home, other, served = _both(stack, resume_timeout=20)
        home.kill()
        assert served.complete().status_code == 200
        home.ready = False
        home.start()
        assert served.complete().status_code == 200
        assert len(other.requests) == 2
        home.ready = True
        home.wait_for(lambda _: served.complete().status_code == 200 and len(home.requests) > 1)
        assert home.probes


def test_probes_end_when_every_replica_takes_requests() -> None:
    with ExitStack() as stack:
        home, _, served = _both(stack)
        home.kill()
        served.complete()
        home.start()
        home.wait_for(lambda fake: fake.probes > 0 and not fake.running)
        home.wait_for(lambda _: served.complete().status_code == 200 and len(home.requests) > 1)
        assert home.probes == 1
