"""What the generator's process is told: which requests, to whom, when, and until when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from perf.load.arrivals import Closed, Poisson
from perf.load.target import Target


@dataclass(frozen=True)
class Asked:
    """`setting.workload.Request`, without what it takes to make one: importing that takes seconds."""

    prompt: str
    output_tokens: int


@dataclass(frozen=True)
class Plan:
    """timeout: seconds for all of the requests together."""

    target: Target
    requests: Sequence[Asked]
    arrivals: Closed | Poisson
    timeout: float

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps({**asdict(self), "arrivals": {type(self.arrivals).__name__: asdict(self.arrivals)}})

    @classmethod
    def from_json(cls, line: str) -> Plan:
        """Return what `to_json` has made."""
        fields = json.loads(line)
        ((kind, arrivals),) = fields["arrivals"].items()
        return cls(
            target=Target(**fields["target"]),
            requests=[Asked(**request) for request in fields["requests"]],
            arrivals={"Closed": Closed, "Poisson": Poisson}[kind](**arrivals),
            timeout=fields["timeout"],
        )
