"""An engine's LoRA adapters: loaded, listed and unloaded; what fails changes nothing; prefixes are of one adapter."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from adapter_files import damage, write_adapter
from engine.engines import completions, engine_of, load, run
from engine.prompts import request_of
from llama_engine.engine.adapters import folder_inside, lora_limits
from llama_engine.engine.engine import Engine
from llama_engine.errors import CheckpointError, InvalidRequest, InvalidSettings
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.settings import Settings
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters: a, b, and one that is damaged."""
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("a", "b", "bad")):
        write_adapter(folder / name, seed)
    damage(folder / "bad")
    return folder


@pytest.fixture
def engine(int8: LoadedModel, loras: Path) -> Engine:
    """An engine with room for two adapters, of which a is loaded."""
    return engine_of(int8, 4, lora_adapters=f"a:7={loras / 'a'}", lora_folder=str(loras), max_loras="2")


def _names(engine: Engine) -> list[str]:
    return [adapter.name for adapter in engine.adapters.loaded()]


def _of(engine: Engine, name: str, request: GenerationRequest) -> GenerationRequest:
    """Return the request by a loaded adapter."""
    (adapter,) = (adapter for adapter in engine.adapters.loaded() if adapter.name == name)
    return replace(request, adapter=adapter)


def test_a_damaged_adapter_of_the_settings_is_named(int8: LoadedModel, loras: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^lora_adapters: x: .*adapter_model\.safetensors") as refused:
        engine_of(int8, lora_adapters=f"a={loras / 'a'},x={loras / 'bad'}")
    assert "\n" not in str(refused.value)


def test_the_same_adapter_loaded_again_changes_nothing(engine: Engine, loras: Path) -> None:
    before = engine.adapters.loaded()
    engine.adapters.load("a", 0, loras / "a")
    assert engine.adapters.loaded() == before


@pytest.mark.parametrize(
    ("name", "number", "folder", "message"),
    [
        ("a", 0, "b", "lora_name is 'a', which is loaded with other content: unload it first"),
        ("a", 8, "a", "lora_task_id is 8; it must be that of 'a', 7: unload it first"),
        ("c", 7, "b", "lora_task_id is 7; it must be no loaded adapter's"),
        ("c", 0, "bad", "lora_name is 'c', one adapter more than max_loras, 2; unload one first"),
    ],
)
def test_what_contradicts_loaded_adapters_is_refused(
    engine: Engine, loras: Path, name: str, number: int, folder: str, message: str
) -> None:
    engine.adapters.load("b", 0, loras / "b")
    with pytest.raises(InvalidRequest, match=message):
        engine.adapters.load(name, number, loras / folder)
    assert _names(engine) == ["a", "b"]


def test_a_failure_in_the_runner_leaves_the_room_free(engine: Engine, loras: Path) -> None:
    with patch.object(engine._model.loras, "load", side_effect=MemoryError), pytest.raises(MemoryError):
        engine.adapters.load("b", 0, loras / "b")
    engine.adapters.load("b", 0, loras / "b")
    assert _names(engine) == ["a", "b"]


def test_a_removed_adapter_keeps_its_room_until_it_is_freed(engine: Engine, loras: Path) -> None:
    engine.adapters.load("b", 0, loras / "b")
    removed = engine.adapters.remove("a")
    with pytest.raises(InvalidRequest, match="max_loras"):
        engine.adapters.load("c", 7, loras / "a")
    engine.adapters.free(removed)
    engine.adapters.load("c", 7, loras / "a")
    assert _names(engine) == ["b", "c"]


def test_prefixes_are_shared_by_one_version_of_an_adapter(checkpoint: LoadedModel, loras: Path) -> None:
    engine = engine_of(checkpoint, 4, lora_folder=str(loras))
    base = request_of(checkpoint, 2, 40, 4)

    def cached(request: GenerationRequest) -> int:
        sequence = engine.builder.build(request)
        run(engine, [sequence])
        return sequence.num_cached_prompt_tokens

    def reload(name: str, folder: str) -> None:
        engine.adapters.free(engine.adapters.remove(name))
        engine.adapters.load(name, 0, loras / folder)

    engine.adapters.load("x", 0, loras / "a")
    engine.adapters.load("y", 0, loras / "a")
    assert [cached(each) for each in (base, _of(engine, "x", base), _of(engine, "y", base))] == [0, 0, 0]
    reload("x", "b")
    assert cached(_of(engine, "x", base)) == 0
    reload("x", "a")
    assert [cached(each) for each in (base, _of(engine, "x", base))] == [32, 32]


def test_an_adapter_beyond_float16_changes_no_other_sequence(loras: Path, tmp_path: Path) -> None:
    checkpoint, huge = load("none", dtype="float16"), write_adapter(tmp_path / "huge", 1)
    weights = huge / "adapter_model.safetensors"
    save_file({name: 1e6 * tensor for name, tensor in load_file(weights).items()}, weights)
    engine = engine_of(checkpoint, 4, lora_adapters=f"a={loras / 'a'}", max_loras="2", prefix_cache="off")
    base = request_of(checkpoint, 1, 40)
    requests = [base, _of(engine, "a", base)]
    expected = completions(engine, requests)
    engine.adapters.load("huge", 0, huge)
    assert completions(engine, requests) == expected


@pytest.mark.parametrize("path", ["..", "{outside}", "link", "a/../../other", "missing", "a/file", "\0", "x" * 5000])
def test_a_path_that_is_no_folder_inside_lora_folder_is_refused(tmp_path: Path, path: str) -> None:
    inside, outside = tmp_path / "loras", tmp_path / "other"
    (inside / "a").mkdir(parents=True)
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    (inside / "a" / "file").touch()
    with pytest.raises(InvalidRequest, match=r"it must be a folder inside the setting lora_folder$"):
        folder_inside(inside, path.format(outside=outside))


def test_relative_and_absolute_paths_inside_lora_folder_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert folder_inside(tmp_path, "a") == folder_inside(tmp_path, str(tmp_path / "a")) == (tmp_path / "a").resolve()


@pytest.mark.parametrize(
    ("parameters", "count"),
    [
        ({}, 0),
        ({"lora_adapters": "a=b,c=d"}, 2),
        ({"lora_adapters": "a=b", "lora_folder": "/x"}, 8),
        ({"lora_folder": "/x", "max_loras": "3"}, 3),
    ],
)
def test_the_room_for_adapters_follows_from_the_settings(parameters: dict[str, str], count: int) -> None:
    assert lora_limits(Settings.parse(parameters, {})).count == count


def test_fewer_max_loras_than_lora_adapters_are_refused() -> None:
    with pytest.raises(InvalidSettings, match="max_loras is 1; it must be at least 2, the number of lora_adapters"):
        lora_limits(Settings.parse({"lora_adapters": "a=b,c=d", "max_loras": "1"}, {}))


def test_the_memory_plan_has_room_for_adapters(int8: LoadedModel, engine: Engine) -> None:
    plan = engine.plan
    assert plan.adapters == int8.lora_bytes(lora_limits(Settings(max_loras=2))) > 0
    assert plan.total - plan.adapters == engine_of(int8, 4).plan.total
    assert " + adapters " in plan.describe()
