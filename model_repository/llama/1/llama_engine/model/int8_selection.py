"""Selects how a CPU multiplies by INT8 weights: the first form of integer terms that is exact and fast here.

The forms are tried on real products, once per process on a small one and once for each shape of weight, and the results
are compared with exact integers. Flags and names of processors decide nothing: ONEDNN_MAX_CPU_ISA and a virtual machine
hide instructions, and where one is missing oneDNN's sums are silently wrong or a hundred times slower.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from llama_engine.errors import one_line
from llama_engine.model.integer_product import MAX_INPUTS, NARROW, SIGNED, UNSIGNED, Form, IntegerProduct
from llama_engine.model.widened_product import BlockwiseProduct

FORMS = (SIGNED, UNSIGNED, NARROW)

ROWS = (1, 2, 31, 64)
"""Numbers of activation rows that are verified."""

SLOW = 8
"""A form this many times slower than the product with widened weights runs in a reference kernel."""

_PROBE = (256, 256)
"""The shape that decides once per process."""

MOST_OUTPUTS = 8192
"""Outputs that are verified, and a rest: an output's sums don't depend on how many there are."""

_DISTINCT = 61
"""Different rows in a weight that is verified; no multiple of a block of any kernel."""

_log = logging.getLogger(__name__)


@functools.cache
def select_form(outputs: int, inputs: int, terms: int) -> Form | None:
    """Return the form for weights [outputs, inputs], None for widened weights; log a warning when one is wrong."""
    if inputs > MAX_INPUTS:
        reason = "INT8 product of %d x %d: weights widened to float32; sums of more than %d leave int32"
        _log.warning(reason, outputs, inputs, MAX_INPUTS)
        return None
    return _first_usable(_forms_of_this_process(terms), outputs, inputs, terms)


@functools.cache
def _forms_of_this_process(terms: int) -> tuple[Form, ...]:
    """Return the forms from the first one on that passes on a small product."""
    form = _first_usable(FORMS, *_PROBE, terms)
    return () if form is None else FORMS[FORMS.index(form) :]


def _first_usable(forms: tuple[Form, ...], outputs: int, inputs: int, terms: int) -> Form | None:
    """Return the first form that passes; log the reasons of those before it in one line."""
    refused = []
    chosen = None
    for form in forms:
        try:
            reason = refusal(form, outputs, inputs, terms)
        except Exception as error:  # noqa: BLE001 - an operator can raise anything, and widened weights always work
            reason = one_line(error)
        if reason is None:
            chosen = form
            break
        refused.append(f"not {form}: {reason}")
    if refused:
        now = "weights widened to float32" if chosen is None else str(chosen)
        # Other 8-bit terms give the same sums; fewer bits or widened weights don't.
        level = logging.INFO if chosen in (SIGNED, UNSIGNED) else logging.WARNING
        _log.log(level, "INT8 product of %d x %d with %d of: %s; %s", outputs, inputs, terms, now, "; ".join(refused))
    return chosen


def refusal(form: Form, outputs: int, inputs: int, terms: int) -> str | None:
    """Return why a form's products of this shape are unusable, too slow or not the exact integers; None if they are."""
    outputs = min(outputs, MOST_OUTPUTS + outputs % 64)
    with _one_thread():
        random = torch.Generator().manual_seed(0)
        distinct = torch.randint(-127, 128, (_DISTINCT, inputs), dtype=torch.int8, generator=random)
        # The largest sums of both signs, and the pairs that saturate first.
        distinct[0], distinct[1] = 127, -127
        which = torch.arange(outputs) % _DISTINCT
        weight, scales = distinct[which], torch.rand(outputs, generator=random)
        bounds = -(1 << (form.bits - 1)), 1 << (form.bits - 1)
        values = torch.randint(*bounds, (terms * max(ROWS), inputs), generator=random)
        values[0], values[1] = bounds[0], bounds[1] - 1
        stack = (values + form.zero_point).to(torch.int8 if form.signed else torch.uint8)
        product = IntegerProduct(weight, scales, form)
        widened, row = BlockwiseProduct(), torch.ones(1, inputs)
        ratio = _seconds(lambda: product(stack[:terms])) / _seconds(lambda: widened.few_rows(row, weight, scales, None))
        # float64 holds every sum exactly.
        sums = (values.double() @ distinct.double().T).float()
    if ratio > SLOW:
        return f"{ratio:.0f} times slower than widened weights"
    for rows in ROWS:
        result, expected = product(stack[: terms * rows]), sums[: terms * rows, which] * scales
        if not torch.equal(result, expected):
            error = (result - expected).abs().max() / expected.abs().max()
            return f"sums of {rows} rows are wrong by {error:.1%} of the largest"
    return None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread, whose processor time a neighbour changes little."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call, the least of three."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)
