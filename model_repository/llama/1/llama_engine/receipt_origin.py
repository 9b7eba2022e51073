"""The server's side of receipts: the checkpoint's digest and the settings that change bits."""

from __future__ import annotations

import logging
from collections.abc import Callable

from llama_engine.api.origin import Origin
from llama_engine.errors import GenerationError, Unavailable
from llama_engine.model.cpu_runner import CompiledLlama
from llama_engine.model.kv_cache import KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.model.rope import depends_on_length
from llama_engine.settings import Settings

DIGEST_SECONDS = 1.0
"""Seconds that a request waits for the digest of a checkpoint; a retry finds it."""

_log = logging.getLogger(__name__)


def receipt_origin(checkpoint: Checkpoint, shape: KVCacheShape, settings: Settings) -> Callable[[], Origin] | None:
    """Return what gives the server's side of receipts; None where bits depend on more than the request.

    What it returns raises Unavailable while the checkpoint's files are still being read.
    """
    info = checkpoint.info
    if info.bits_depend_on:
        return None
    # The compiled kernels of all instruction sets give the same bits.
    product = "compiled" if isinstance(checkpoint.model, CompiledLlama) else info.product
    served = {
        "product": product,
        "quantization": settings.quantization,
        "int8_terms": settings.int8_terms,
        "int8_outlier_ratio": f"{settings.int8_outlier_ratio:g}",
        "dtype": str(info.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(shape.dtype).removeprefix("torch."),
    }
    if depends_on_length(checkpoint.config):
        served["max_model_len"] = str(checkpoint.max_model_len)

    def origin() -> Origin:
        try:
            return Origin(checkpoint.digest.wait(DIGEST_SECONDS), served)
        except TimeoutError:
            raise Unavailable("the checkpoint's files are being read for receipts; try again later") from None
        except OSError as error:
            _log.error("no receipts: the checkpoint's files can't be read: %s", error)
            raise GenerationError(
                "the checkpoint's files can't be read for receipts; the server's log has the reason"
            ) from None

    return origin
