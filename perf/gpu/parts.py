"""The parts of a run, each as a list of tasks with names of their own: what a resumed run leaves out is a task.

The order within a run is that of what one random model can be in turn: unquantized first. Every task is bounded in
time, and one that fails is a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from perf.course import Course, Measurement, reason
from perf.gpu import capacity, correctness, decoding, environment, graphs, products
from perf.gpu.decoding import Wave
from perf.gpu.models import RandomLlama
from perf.gpu.options import Options
from perf.gpu.precision import FP16, FP32, INT8, Precision, precisions
from perf.roofline.rates import DeviceRates

Task = Callable[[], Mapping[str, object]]

OUTLIER_ROWS = (1, 32)
"""Row counts at threshold 6: every layer waits for the device there, so a wave takes long, and it isn't the product."""

_LEAST_S = {"environment": 0.0, "correct": 10.0, "quality": 15.0, "capacity": 25.0, "decode": 15.0, "stock": 25.0,
            "graph": 25.0, "products": 5.0, "article": 120.0, "tiles": 30.0}  # fmt: skip
"""Seconds that must be left for a task of a part to begin; guesses, until they have been measured."""


@dataclass
class Ground:
    """What the tasks of a run share. rates: the device's, measured."""

    options: Options
    course: Course
    rates: DeviceRates
    llama: RandomLlama = field(init=False)
    _exact: list[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self.llama = RandomLlama(self.options.amount.shape, self.options.device, self.options.kernels)

    @property
    def exact(self) -> list[torch.Tensor]:
        """FP32's logits of the texts that precisions are compared on, computed once."""
        if self._exact is None:
            amount = self.options.amount
            checkpoint = correctness.embedded(FP32, self.options.device)
            self._exact = correctness.exact_logits(checkpoint, amount.rows, amount.steps)
        return self._exact


class DeviceLostError(Exception):
    """The device's context is broken: nothing else in this process would work. `str()` says since when and why."""


def run(ground: Ground) -> None:
    """Run every task of the parts that were asked for, as long as there is time. Raises DeviceLostError."""
    options = ground.options
    _run(ground, "environment", _environment(ground))
    _run(ground, "correct", _correct(ground))
    for precision in precisions(options.device.type):
        for part, tasks in (("stock", _stock), ("capacity", _capacity), ("decode", _decode), ("graph", _graph)):
            _run(ground, part, tasks(ground, precision))
    ground.llama.free()
    # Behind what the aims are about: its text takes a while to be rebuilt.
    if "quality" in options.parts:
        _quality(ground)
    _run(ground, "products", _products(ground))
    _run(ground, "tiles", _tiles(ground))
    if "article" in options.parts:
        _article(ground)


def _run(ground: Ground, part: str, tasks: Iterator[tuple[str, Task]]) -> None:
    """Run a part's tasks, if it was asked for."""
    if part in ground.options.parts:
        for key, task in tasks:
            _measure(ground.course, part, key, task, ground.options.smoke)


def _measure(course: Course, part: str, key: str, task: Task, smoke: bool) -> None:
    def timely() -> Measurement:
        course.refuse_without(0.0 if smoke else _LEAST_S[part])
        return task()

    course.measure(key, {}, timely)
    if not smoke and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except Exception as error:
            # An address that isn't there, say: nothing in this process can use the device any more.
            raise DeviceLostError(f"{key}: {reason(error)}") from error


def _fused(ground: Ground, task: Task) -> Task:
    """Return a task that uses a fused kernel whatever the engine does: not under `--kernels stock`."""

    def task_unless_left_out() -> Mapping[str, object]:
        if ground.options.kernels != "fused":
            raise RuntimeError(f"left out by --kernels {ground.options.kernels}")
        return task()

    return task_unless_left_out


def _environment(ground: Ground) -> Iterator[tuple[str, Task]]:
    yield "environment", lambda: environment.describe(ground.options.device)


def _correct(ground: Ground) -> Iterator[tuple[str, Task]]:
    device, amount = ground.options.device, ground.options.amount
    yield (
        "correct/tokens/fp32",
        lambda: correctness.exactness(correctness.embedded(FP32, device), amount.batches, amount.exact_s),
    )
    yield (
        "correct/tokens/fp32_graphs",
        lambda: correctness.exactness(correctness.embedded(FP32, device), amount.batches, amount.exact_s / 2, True),
    )
    yield (
        "correct/tokens/fp32_fused",
        _fused(
            ground,
            lambda: correctness.exactness(correctness.embedded(FP32, device, True), amount.batches, amount.exact_s / 2),
        ),
    )
    for precision in (FP32, FP16, *precisions(device.type)[1:]):
        yield (
            f"correct/logits/{precision.key}",
            lambda precision=precision: correctness.tolerance(  # type: ignore[misc]
                precision, device, ground.exact, amount.rows, amount.steps
            ),
        )
    for precision in (FP16, INT8):
        yield (
            f"correct/logits/{precision.key}_fused",
            _fused(
                ground,
                lambda precision=precision: correctness.tolerance(  # type: ignore[misc]
                    precision, device, ground.exact, amount.rows, amount.steps, True
                ),
            ),
        )


def _capacity(ground: Ground, precision: Precision) -> Iterator[tuple[str, Task]]:
    extent = ground.options.amount.extent
    yield f"capacity/{precision.key}", lambda: capacity.steady(ground.llama.at(precision), extent)
    if precision == INT8:
        yield f"capacity/{precision.key}/graphs", lambda: capacity.steady(ground.llama.at(precision), extent, True)
    yield f"capacity/{precision.key}/scarce", lambda: capacity.scarce(ground.llama.at(precision), extent)


def _decode(ground: Ground, precision: Precision) -> Iterator[tuple[str, Task]]:
    amount = ground.options.amount
    for rows in amount.decode_rows:
        if (precision.threshold or 0) == 0 or rows in OUTLIER_ROWS:
            wave = Wave(rows, amount.prompt, amount.output)
            yield (
                f"decode/{precision.key}/{rows}",
                lambda wave=wave: decoding.engine(  # type: ignore[misc]
                    ground.llama.at(precision), precision, wave, ground.rates
                ),
            )


def _stock(ground: Ground, precision: Precision) -> Iterator[tuple[str, Task]]:
    amount = ground.options.amount
    wave = Wave(amount.decode_rows[0], amount.prompt, amount.output)
    if precision.weights == "int8":
        yield (
            f"stock/{precision.key}/{wave.rows}",
            lambda: decoding.stock(ground.llama.at(precision, stock=True), precision, wave, ground.rates),
        )
    if precision == INT8:
        # What the engine makes of the same layers: what its own ones are to be compared with.
        for rows in (row for row in amount.decode_rows if row in OUTLIER_ROWS):
            engine_wave = Wave(rows, amount.prompt, amount.output)
            yield (
                f"stock_engine/{precision.key}/{rows}",
                lambda engine_wave=engine_wave: decoding.engine(  # type: ignore[misc]
                    ground.llama.at(precision, stock=True), precision, engine_wave, ground.rates
                ),
            )


def _graph(ground: Ground, precision: Precision) -> Iterator[tuple[str, Task]]:
    amount = ground.options.amount
    for rows in amount.graph_rows if (precision.threshold or 0) == 0 else ():
        wave = Wave(rows, amount.prompt, amount.output)
        launched = ground.course.results.measurements.get(f"decode/{precision.key}/{rows}")
        yield (
            f"graph/{precision.key}/{rows}",
            lambda wave=wave, launched=launched: graphs.measure(  # type: ignore[misc]
                ground.llama.at(precision), precision, wave, ground.rates, launched
            ),
        )


def _products(ground: Ground) -> Iterator[tuple[str, Task]]:
    amount, device = ground.options.amount, ground.options.device
    for matrix in products.Matrix.of(amount.shape):
        for rows in amount.product_rows:
            yield (
                f"products/{matrix.outputs}x{matrix.inputs}/{rows}",
                partial(
                    products.measure,
                    matrix,
                    rows,
                    device,
                    ground.rates,
                    amount.product_s,
                    ground.options.kernels == "fused",
                ),
            )


def _tiles(ground: Ground) -> Iterator[tuple[str, Task]]:
    amount, device = ground.options.amount, ground.options.device
    for matrix in products.Matrix.of(amount.shape):
        for rows in (32, 1):
            yield (
                f"tiles/{matrix.outputs}x{matrix.inputs}/{rows}",
                _fused(ground, partial(products.tiles, matrix, rows, device, ground.rates, amount.product_s)),
            )


def _quality(ground: Ground) -> None:
    """Every candidate is a measurement, and the reference another one: they come together."""
    course = ground.course
    # Of a run before: why it couldn't be done then.
    course.results.forget("quality")
    try:
        # What it needs to rebuild the text is more than the other parts need.
        from perf.gpu import quality

        amount = ground.options.amount
        for key, task in quality.tasks(ground.options.device, amount.texts, amount.context, ground.options.smoke):
            chosen = _fused(ground, task) if key == quality.FUSED.key else task
            _measure(course, "quality", f"quality/{key}", chosen, ground.options.smoke)
    except DeviceLostError:
        raise
    except Exception as error:  # noqa: BLE001 - as in Course.measure
        course.measure("quality", {}, partial(_raise, error))


def _article(ground: Ground) -> None:
    options, course = ground.options, ground.course
    course.results.forget("article")
    if options.device.type != "cuda":
        course.note("article", {"not_run": "needs CUDA"})
        return
    try:
        course.refuse_without(_LEAST_S["article"])
        # Triton and its clients are needed from here on only.
        from perf.gpu import served

        served.article(course, options, ground.rates)
    except Exception as error:  # noqa: BLE001 - as in Course.measure
        course.measure("article", {}, partial(_raise, error))


def _raise(error: Exception) -> Mapping[str, object]:
    raise error
