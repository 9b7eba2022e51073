"""The requests of /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from triton_llama_openai.protocol.schema import ModelName, OnlyFalse, Schema, without_effect

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{1,128}$")]


class LoadAdapterRequest(Schema):
    """An adapter to load."""

    lora_name: AdapterName
    """the name that requests give as `model`: 1 … 128 letters, digits, `.`, `_`, `/`, `-`"""
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """folder of the adapter at Triton, within its setting `lora_folder`"""
    lora_int_id: Annotated[int, Field(ge=1, le=2**64 - 1)] | None = None
    """the adapter's number, for requests to Triton with `lora_task_id`"""
    base_model_name: ModelName | None = None
    """a served name; not needed where there is only one"""
    load_inplace: OnlyFalse = None
    """another version of a loaded adapter needs an unload before"""


class UnloadAdapterRequest(Schema):
    """An adapter to unload."""

    lora_name: AdapterName
    """its name"""
    base_model_name: ModelName | None = None
    """a served name; not needed where there is only one"""
    lora_int_id: int | None = without_effect("vLLM's; the name is enough")
