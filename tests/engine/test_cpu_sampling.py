"""The draw on a CPU gives the tokens of the draw by sorting."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from llama_engine.sampling import draw as cpu_sampling
from llama_engine.sampling.draw import apply_temperature, draw, draw_on_cpu, keep_min_p, keep_top_k_top_p, step_keys
from torch import Tensor

ROWS = 64

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _keys(rows: int, step: int = 0) -> Tensor:
    return torch.from_numpy(step_keys(np.arange(rows, dtype=np.uint64), np.full(rows, step)))


def _random(seed: int, vocabulary: int) -> Arguments:
    """Logits from nearly flat to nearly certain, some tied or ruled out, and every combination of the parameters."""
    source = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(ROWS, generator=source)

    logits = torch.randn(ROWS, vocabulary, generator=source) * uniform(0, 8)[:, None]
    logits[::7] = logits[::7].round()
    logits[::5, 3:] = torch.where(logits[::5, 3:] < -1, -torch.inf, logits[::5, 3:])
    temperature = uniform(0.05, 2)
    temperature[uniform(0, 1) < 0.1] = 1e-45
    top_k = torch.randint(1, vocabulary + 1, (ROWS,), generator=source)
    top_k = torch.where(uniform(0, 1) < 0.3, top_k.clamp(max=50), top_k)
    top_k[uniform(0, 1) < 0.5] = vocabulary
    top_p = torch.where(uniform(0, 1) < 0.2, uniform(1e-6, 0.05), uniform(0.05, 0.999))
    top_p[uniform(0, 1) < 0.3] = 1.0
    return logits, temperature, top_k, top_p, _keys(ROWS, seed)


@pytest.mark.parametrize("vocabulary", [2, 5, 300, 3072, 20_000])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_the_draw_by_sorting(vocabulary: int, seed: int) -> None:
    logits, temperature, top_k, top_p, keys = arguments = _random(seed, vocabulary)
    min_p = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)) ** 4
    min_p[::3], min_p[1] = 0.0, 1.0
    warm = keep_min_p(apply_temperature(logits, temperature), min_p.log())
    expected = draw(keep_top_k_top_p(warm, top_k, top_p), keys)
    drawn = draw_on_cpu(*arguments, min_p.log())
    assert torch.equal(drawn, expected)
    # A min_p of 0 is off, and at 1 only the best token is left.
    assert torch.equal(drawn[::3], draw_on_cpu(*arguments)[::3])
    assert logits[1, drawn[1]] == logits[1].max()
    for row in range(0, ROWS, 9):
        alone = [argument[row : row + 1] for argument in (*arguments, min_p.log())]
        assert draw_on_cpu(*alone).tolist() == [int(drawn[row])]


@pytest.mark.parametrize(("name", "value"), [("MARGIN", 0.3), ("EXPECTED_FINISHERS", 0.5), ("MIN_TOP_P", 1.0)])
def test_undecided_rows_are_drawn_by_sorting(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _random(5, 3072)
    expected = draw_on_cpu(*arguments)
    monkeypatch.setattr(cpu_sampling, name, value)
    with patch.object(cpu_sampling, "draw", wraps=draw) as sorting:
        assert torch.equal(draw_on_cpu(*arguments), expected)
    assert sorting.call_count == 1
