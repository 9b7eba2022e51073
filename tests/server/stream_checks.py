"""What holds for every stream that ends well."""

from __future__ import annotations

import pytest
from server.streams import STREAM_WIRES, Streamed, StreamWire, stream
from server.wires import Answer, ask, generate
from triton_local.server import LocalTriton

every_wire = pytest.mark.parametrize("wire", STREAM_WIRES, ids=lambda wire: wire.__name__)


def check_shape(streamed: Streamed) -> None:
    """Check what holds for every stream that ends well."""
    *before, last = streamed.pieces
    assert all(piece.text for piece in before), "only the last piece may be empty"
    assert {piece.finish_reason for piece in before} <= {""}
    assert {piece.num_input_tokens for piece in before} <= {0}
    assert all(piece.num_output_tokens >= 1 for piece in streamed.pieces)
    assert last.finish_reason in ("stop", "length")
    assert last.num_input_tokens >= 1
    if streamed.finals is not None:
        assert streamed.finals == [len(streamed.pieces) - 1], "the final flag comes once, with the last piece"
        assert streamed.empty == 0


def both(server: LocalTriton, wire: StreamWire, **inputs: object) -> tuple[Answer, Streamed]:
    """Ask for one response and for a stream, which must say the same."""
    whole = ask(server, generate, **inputs)
    streamed = stream(server, wire, **inputs)
    check_shape(streamed)
    assert streamed.whole == whole
    return whole, streamed
