"""Bad values of every field: a 400 with the field's name, no 500, no hang, good requests unharmed."""

from __future__ import annotations

import pytest
from frontend.attacks import attack
from frontend.endpoints import Endpoint
from frontend.fake_triton import FakeTriton
from notes import Note


@pytest.mark.parametrize("count", [300, pytest.param(4000, marks=pytest.mark.long)])
def test_a_bad_value_of_any_field_is_refused_by_name_and_harms_no_other_request(
    served: Endpoint, triton: FakeTriton, count: int, note: Note
) -> None:
    def is_good() -> bool:
        return bool(served.chat().json()["choices"][0]["message"]["content"] == " Hello, world.")

    statuses = attack(served, count, is_good)
    note(f"endpoint: bad values: {dict(statuses)}")
    assert sum(statuses.values()) >= count
    assert statuses[400] > count / 2
