"""Bad values of every field of OpenAI's protocol, with the real model behind the endpoint."""

from __future__ import annotations

import pytest
from frontend.attacks import attack
from notes import Note
from server.metrics import Metrics
from server.openai_endpoint import in_front_of
from triton_local.server import LocalTriton


@pytest.mark.long
def test_a_bad_value_of_any_field_is_refused_by_name_and_harms_no_other_request(
    streaming: LocalTriton, note: Note
) -> None:
    metrics = Metrics(streaming)
    with in_front_of(streaming) as served:

        def text() -> str:
            answer = served.complete(temperature=0, max_tokens=12)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        expected = text()
        statuses = attack(served, 2200, lambda: text() == expected)
    note(f"endpoint with the model: bad values: {dict(statuses)}")
    assert sum(statuses.values()) >= 2200
    metrics.wait_for_slots(0)
