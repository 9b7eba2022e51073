"""The parts of a run. Every task has a key, is bounded in time, and has its reason in the results if it fails.

The order follows what one random model can be in turn: unquantized first, because quantizing can't be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial

import torch

from perf.course import Course, reason
from perf.gpu import capacity, correctness, decoding, environment, products
from perf.gpu.decoding import Wave
from perf.gpu.models import FP16, FP32, INT8, Precision, RandomLlama, precisions
from perf.gpu.options import Options
from perf.roofline.rates import DeviceRates

Task = Callable[[], Mapping[str, object]]

OUTLIER_ROWS = (1, 32)
"""Row counts at threshold 6, where every layer waits for the device and a wave takes long."""

_LEAST_S = {"environment": 0.0, "correct": 10.0, "quality": 15.0, "capacity": 25.0, "decode": 15.0, "stock": 25.0,
            "graph": 25.0, "products": 5.0, "article": 120.0, "tiles": 30.0}  # fmt: skip
"""Seconds that must be left to begin a task of a part; estimates, not measured yet."""


class DeviceLostError(Exception):
    """The CUDA context is broken, so nothing else in this process would work. `str()` names the task and the error."""


class Run:
    """One run over the parts that were chosen. rates: the device's, measured."""

    def __init__(self, options: Options, course: Course, rates: DeviceRates) -> None:
        self.options = options
        self.course = course
        self.rates = rates
        self.amount = options.amount
        self.device = options.device
        self.llama = RandomLlama(options.amount.shape, options.device, options.kernels)

    def all(self) -> None:
        """Run every task for which there is time. Raises DeviceLostError."""
        self.measure("environment", "environment", lambda: environment.describe(self.device))
        self.correct()
        for precision in precisions(self.device.type):
            self.stock(precision)
            self.capacity(precision)
            self.decode(precision)
            self.graph(precision)
        self.llama.free()
        # After what the aims need: rebuilding its text takes a while.
        self.quality()
        self.products()
        self.tiles()
        self.article()

    def measure(self, part: str, key: str, task: Task, fused: bool = False) -> None:
        """Run a task if its part was chosen. fused: it uses a fused kernel, and is left out by --kernels stock."""
        smoke = self.options.smoke
        if part not in self.options.parts:
            return

        def timely() -> Mapping[str, object]:
            if not smoke:
                self.course.refuse_without(_LEAST_S[part])
            if fused and self.options.kernels != "fused":
                raise RuntimeError(f"left out by --kernels {self.options.kernels}")
            return task()

        self.course.measure(key, {}, timely)
        if not smoke and torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except Exception as error:
                # After an illegal address, say, every later CUDA call of this process fails.
                raise DeviceLostError(f"{key}: {reason(error)}") from error

    @cached_property
    def exact(self) -> list[torch.Tensor]:
        """FP32's logits of the texts that the precisions are compared on."""
        return correctness.exact_logits(correctness.embedded(FP32, self.device), self.amount.rows, self.amount.steps)

    def correct(self) -> None:
        """Compare tokens and logits of the embedded checkpoint."""
        amount = self.amount

        def tokens(seconds: float, graphs: bool = False, fused: bool = False) -> Mapping[str, object]:
            checkpoint = correctness.embedded(FP32, self.device, fused)
            return correctness.exactness(checkpoint, amount.batches, seconds, graphs)

        def logits(precision: Precision, fused: bool = False) -> Mapping[str, object]:
            return correctness.tolerance(precision, self.device, self.exact, amount.rows, amount.steps, fused)

        self.measure("correct", "correct/tokens/fp32", partial(tokens, amount.exact_s))
        self.measure("correct", "correct/tokens/fp32_graphs", partial(tokens, amount.exact_s / 2, graphs=True))
        self.measure("correct", "correct/tokens/fp32_fused", partial(tokens, amount.exact_s / 2, fused=True), True)
        for precision in (FP32, FP16, *precisions(self.device.type)[1:]):
            self.measure("correct", f"correct/logits/{precision.key}", partial(logits, precision))
        for precision in (FP16, INT8):
            self.measure("correct", f"correct/logits/{precision.key}_fused", partial(logits, precision, True), True)

    def capacity(self, precision: Precision) -> None:
        """Compare memory with its plan, under full load and when it is scarce."""
        extent, key = self.amount.extent, f"capacity/{precision.key}"
        self.measure("capacity", key, lambda: capacity.steady(self.llama.at(precision), extent))
        if precision == INT8:
            self.measure(
                "capacity", f"{key}/graphs", lambda: capacity.steady(self.llama.at(precision), extent, graphs=True)
            )
        self.measure("capacity", f"{key}/scarce", lambda: capacity.scarce(self.llama.at(precision), extent))

    def decode(self, precision: Precision) -> None:
        """Run waves through the engine, its steps launched from Python."""
        for rows in self.amount.decode_rows:
            if not precision.threshold or rows in OUTLIER_ROWS:
                self.measure("decode", f"decode/{precision.key}/{rows}", partial(self._wave, precision, rows))

    def stock(self, precision: Precision) -> None:
        """Run waves through generate(), and through the engine with the same layers: what its own compare with."""
        rows = self.amount.decode_rows[0]

        def generate() -> Mapping[str, object]:
            checkpoint = self.llama.at(precision, stock=True)
            return decoding.stock(checkpoint, precision, self._of(rows), self.rates)

        if precision.weights == "int8":
            self.measure("stock", f"stock/{precision.key}/{rows}", generate)
        if precision == INT8:
            for rows_of_engine in (one for one in self.amount.decode_rows if one in OUTLIER_ROWS):
                key = f"stock_engine/{precision.key}/{rows_of_engine}"
                self.measure("stock", key, partial(self._wave, precision, rows_of_engine, stock=True))

    def graph(self, precision: Precision) -> None:
        """Run the same waves with the steps replayed as CUDA graphs."""

        def replayed(rows: int) -> Mapping[str, object]:
            found = self._wave(precision, rows, graphs=True)
            launched = self.course.results.measurements.get(f"decode/{precision.key}/{rows}")
            if launched is None or "texts" not in launched:
                return found
            # Other tokens are no failure: random weights give logits that are nearly equal.
            return {**found, "same_tokens_as_launched": found["texts"] == launched["texts"]}

        if not precision.threshold:
            for rows in self.amount.graph_rows:
                self.measure("graph", f"graph/{precision.key}/{rows}", partial(replayed, rows))

    def products(self) -> None:
        """Time every way to multiply with an 8-bit weight."""
        seconds, fused = self.amount.product_s, self.options.kernels == "fused"
        for matrix in products.Matrix.of(self.amount.shape):
            for rows in self.amount.product_rows:
                key = f"products/{matrix.outputs}x{matrix.inputs}/{rows}"
                task = partial(products.measure, matrix, rows, self.device, self.rates, seconds, fused)
                self.measure("products", key, task)

    def tiles(self) -> None:
        """Time the fused product with the weight cut in many ways."""
        for matrix in products.Matrix.of(self.amount.shape):
            for rows in (32, 1):
                key = f"tiles/{matrix.outputs}x{matrix.inputs}/{rows}"
                task = partial(products.tiles, matrix, rows, self.device, self.rates, self.amount.product_s)
                self.measure("tiles", key, task, fused=True)

    def quality(self) -> None:
        """Measure each quantization's distance from the unquantized weights."""
        if "quality" not in self.options.parts:
            return
        # An earlier run's reason why this part could not begin.
        self.course.results.forget("quality")
        try:
            # Imported here: rebuilding the text needs more packages than the other parts.
            from perf.gpu import quality

            tasks = quality.tasks(self.device, self.amount.texts, self.amount.context, self.options.smoke)
            for key, task in tasks:
                self.measure("quality", f"quality/{key}", task, fused=key == quality.FUSED.key)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the reason is the result, as in Course.measure
            self.course.note("quality", {"not_run": reason(error)})

    def article(self) -> None:
        """Measure the article's servers through Triton."""
        if "article" not in self.options.parts:
            return
        self.course.results.forget("article")
        if self.device.type != "cuda":
            self.course.note("article", {"not_run": "needs CUDA"})
            return
        try:
            self.course.refuse_without(_LEAST_S["article"])
            # Imported here: only this part needs Triton and its clients.
            from perf.gpu import served

            served.article(self.course, self.options, self.rates)
        except Exception as error:  # noqa: BLE001 - the reason is the result, as in Course.measure
            self.course.note("article", {"not_run": reason(error)})

    def _of(self, rows: int) -> Wave:
        return Wave(rows, self.amount.prompt, self.amount.output)

    def _wave(self, precision: Precision, rows: int, stock: bool = False, graphs: bool = False) -> Mapping[str, object]:
        return decoding.engine(self.llama.at(precision, stock), precision, self._of(rows), self.rates, graphs)
