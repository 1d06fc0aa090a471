"""The connector, against stand-ins of what it touches of vLLM. `tests.engines.prove` asks a real
one.
"""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from protokv.core.tensors import TensorDict
from protokv.errors import StateNotFound
from protokv.slots import SlotsHead, write_slots
from protokv.texts import JsonObject
from tests.tolerance import check_near

LAYERS, HEADS, SIZE, SLOTS, BLOCK = 3, 2, 32, 45, 16
PREFIX = [7, 8, 9]


class FullAttentionSpec:
    """A layer that keeps every token."""


class Attention:
    """A layer with a paged cache `[slots, H, D]` of keys and of values, which attends to all of the
    places that it is told.
    """

    places = torch.arange(0)

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int) -> None:
        self.head_size = head_size
        self.kv_cache = torch.zeros(2, 40 * BLOCK, num_kv_heads, head_size)
        self.impl = SimpleNamespace(scale=scale, do_kv_cache_update=self._write)

    def _write(self, layer: Any, keys: Any, values: Any, cache: Any, places: Any) -> None:
        cache[0, places] = keys
        cache[1, places] = values

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        heads = query.view(len(query), -1, self.head_size)
        keys, values = self.kv_cache[:, self.places]
        groups = heads.shape[1] // keys.shape[1]
        logits = torch.einsum("thd,nhd->htn", heads, keys.repeat_interleave(groups, 1))
        weights = (logits * self.impl.scale).softmax(-1)
        return torch.einsum("htn,nhd->thd", weights, values.repeat_interleave(groups, 1)).flatten(1)


class InputProcessor:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def process_inputs(self, request: Any) -> Any:
        return request


class Base:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.metadata: Any = None

    def _get_connector_metadata(self) -> Any:
        return self.metadata


STAND_INS: dict[str, JsonObject] = {
    "vllm": {},
    "vllm.config": {},
    "vllm.distributed": {},
    "vllm.distributed.kv_transfer": {},
    "vllm.distributed.kv_transfer.kv_connector": {},
    "vllm.distributed.kv_transfer.kv_connector.v1": {
        "base": SimpleNamespace(KVConnectorBase_V1=Base, KVConnectorMetadata=object)
    },
    "vllm.exceptions": {"VLLMValidationError": type("VLLMValidationError", (ValueError,), {})},
    "vllm.v1": {},
    "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttentionSpec},
    "vllm.v1.engine": {},
    "vllm.v1.engine.input_processor": {"InputProcessor": InputProcessor},
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.attention": {"Attention": Attention},
}


def make_config(folder: Path, **settings: Any) -> Any:
    model = SimpleNamespace(
        model=str(folder / "model"),
        max_model_len=200,
        get_num_layers=lambda _: LAYERS,
        get_total_num_kv_heads=lambda: HEADS,
        get_head_size=lambda: SIZE,
    )
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_module_path="protokv.vllm",
            kv_connector_extra_config={"states": str(folder / "states"), **settings},
            kv_load_failure_policy="fail",
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK),
        parallel_config=SimpleNamespace(world_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=model,
    )


def make_tensors(seed: int) -> TensorDict:
    g = torch.Generator().manual_seed(seed)
    shape = (LAYERS, SLOTS, HEADS)
    bias = torch.rand(shape, generator=g) * 5
    bias[..., -2:, 0] = -torch.inf
    return {
        "keys": torch.randn(*shape, SIZE, generator=g),
        "values": torch.randn(*shape, SIZE, generator=g),
        "bias": bias,
        "positions": torch.zeros(*shape, 1, dtype=torch.int64),
    }


def make_head(**changes: Any) -> SlotsHead:
    known: JsonObject = {
        "slots": SLOTS,
        "commit": "c0",
        "model": "m",
        "family": "llama",
        "dtype": "float32",
        "weights_digest": "",
        "biased": True,
        "free": True,
    }
    return SlotsHead(**known | {"ids": PREFIX} | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "states").mkdir()
    write_slots(tmp_path / "states/talk.kv.safetensors", make_head(), make_tensors(0))
    return tmp_path


@pytest.fixture
def vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, registered in stand-ins."""
    for name, content in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    config: Any = sys.modules["vllm.config"]
    config.get_current_vllm_config = lambda: config.now
    config.now = make_config(folder)
    monkeypatch.setattr(Attention, "__init__", Attention.__init__)
    monkeypatch.setattr(Attention, "forward", Attention.forward)
    monkeypatch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs)
    monkeypatch.delitem(sys.modules, "protokv.vllm", raising=False)
    module = importlib.import_module("protokv.vllm")
    module.register()
    module.register()
    yield module
    sys.modules.pop("protokv.vllm", None)


def ask(config: Any, ids: list[int], **changes: Any) -> Any:
    """Return a request as it comes to the engine."""
    params = changes.pop("params", {"state": "talk"})
    sampling = SimpleNamespace(
        extra_args={"kv_transfer_params": params} if params else None,
        max_tokens=4,
        prompt_logprobs=None,
    )
    vars(sampling).update(changes.pop("sampling", {}))
    request = SimpleNamespace(
        sampling_params=sampling, prompt_token_ids=ids, cache_salt=None, mm_features=None
    )
    vars(request).update(changes)
    return InputProcessor(config).process_inputs(request)


def schedule(request: Any) -> Any:
    known = request.sampling_params.extra_args["kv_transfer_params"]
    return SimpleNamespace(kv_transfer_params=known)


def make_connector(vllm: Any, config: Any, groups: Any = None) -> Any:
    names = [f"layer.{number}" for number in range(LAYERS)]
    group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=names)
    return vllm.ProtoKVConnector(config, None, SimpleNamespace(kv_cache_groups=groups or [group]))


def load(connector: Any, request: Any, computed: int, blocks: list[int], layers: Any) -> set[int]:
    """Do what a scheduler and a worker do before a forward; return the blocks that failed."""
    scheduled = schedule(request)
    lacking, later = connector.get_num_new_matched_tokens(scheduled, computed)
    assert not later
    held = SimpleNamespace(get_block_ids=lambda: (blocks,))
    connector.update_state_after_alloc(scheduled, held, lacking)
    connector.metadata = connector.build_connector_meta(None)
    context = SimpleNamespace(no_compile_layers=layers)
    connector.start_load_kv(context)
    failed: set[int] = connector.get_block_ids_with_load_errors()
    assert connector.build_connector_meta(None) == []
    return failed


def make_layers() -> dict[str, Attention]:
    return {f"layer.{i}": Attention(2 * HEADS, SIZE, SIZE**-0.5, HEADS) for i in range(LAYERS)}


def test_a_request_stands_behind_the_slots_and_its_cache_is_salted_by_the_commit(
    vllm: Any, folder: Path
) -> None:
    request = ask(make_config(folder), [1, 2], params={"state": "talk"}, cache_salt="mine")
    assert request.prompt_token_ids[-2:] == [1, 2]
    assert len(request.prompt_token_ids) == SLOTS + 2
    assert set(request.prompt_token_ids[:SLOTS]) == set(PREFIX)
    assert request.cache_salt == "c0mine"
    assert schedule(request).kv_transfer_params["slots"] == SLOTS


@pytest.mark.parametrize("params", [None, {"do_remote_decode": True}, {"slots": 99, "commit": "x"}])
def test_other_requests_stay_as_they_are_and_load_nothing(
    vllm: Any, folder: Path, params: Any
) -> None:
    request = ask(make_config(folder), [1, 2], params=params)
    assert (request.prompt_token_ids, request.cache_salt) == ([1, 2], None)
    connector = make_connector(vllm, make_config(folder))
    scheduled = SimpleNamespace(kv_transfer_params=params)
    assert connector.get_num_new_matched_tokens(scheduled, 0) == (0, False)


def test_a_server_with_another_connector_stays_as_it_is(vllm: Any, folder: Path) -> None:
    config = make_config(folder)
    config.kv_transfer_config.kv_connector_module_path = "another"
    assert ask(config, [1]).prompt_token_ids == [1]
    sys.modules["vllm.config"].now = config  # type: ignore[attr-defined]
    assert Attention(4, SIZE, 1.0, 2).head_size == SIZE


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"params": {"state": "none"}}, "there is no state none"),
        ({"params": {"state": "../outside"}}, "there is no state"),
        ({"params": {"state": "link"}}, "there is no state"),
        ({"params": {"state": "/etc/passwd"}}, "there is no state"),
        ({"params": {"state": "a\x00b"}}, "there is no state"),
        ({"params": {"state": 5}}, "there is no state"),
        ({"params": {"state": "cut"}}, "has no slots"),
        ({"params": {"state": "bits"}}, "not those that were written"),
        ({"params": {"state": "foreign"}}, "of another model, other"),
        ({"params": {"state": "small"}}, "of another model"),
        ({"params": {"state": "talk", "commit": "c9"}}, "another commit"),
        ({"prompt_token_ids": []}, "the question is empty"),
        ({"mm_features": ["picture"]}, "no pictures"),
        ({"sampling": {"prompt_logprobs": 1}}, "no log probabilities"),
        ({"sampling": {"max_tokens": 200}}, "max_model_len is 200"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    vllm: Any, folder: Path, changes: Any, why: str
) -> None:
    states = folder / "states"
    whole = (states / "talk.kv.safetensors").read_bytes()
    (states / "cut.kv.safetensors").write_bytes(whole[:-5])
    (states / "bits.kv.safetensors").write_bytes(whole[:-5] + bytes(5))
    (folder / "outside.kv.safetensors").write_bytes(whole)
    (states / "link.kv.safetensors").symlink_to(folder / "outside.kv.safetensors")
    foreign = make_head(weights_digest="ab", model="other")
    write_slots(states / "foreign.kv.safetensors", foreign, make_tensors(0))
    fewer = {name: one[:2] for name, one in make_tensors(0).items()}
    write_slots(states / "small.kv.safetensors", make_head(), fewer)
    (folder / "model").mkdir()
    (folder / "model/model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=why) as refused:
        ask(make_config(folder), [1, 2], **changes)
    assert len(str(refused.value).splitlines()) == 1
    assert ask(make_config(folder), [1, 2]).cache_salt == "c0"


def test_attention_over_loaded_slots_is_that_with_their_bias(vllm: Any, folder: Path) -> None:
    config = make_config(folder)
    layers = make_layers()
    blocks = [5, 30, 2, 11]
    request = ask(config, [1, 2])
    connector = make_connector(vllm, config)
    assert load(connector, request, 0, blocks, layers) == set()
    # What is computed already is not written again.
    whole = layers["layer.0"].kv_cache.clone()
    layers["layer.0"].kv_cache[:] = 9
    assert load(connector, request, 2 * BLOCK, blocks, layers) == set()
    written = layers["layer.0"].kv_cache != 9
    assert {*written.nonzero()[:, 1].tolist()} == {*range(2 * BLOCK, 2 * BLOCK + SLOTS - 32)}
    layers["layer.0"].kv_cache[:] = whole
    rows = torch.tensor([block * BLOCK + i for block in blocks for i in range(BLOCK)])[:SLOTS]
    tensors = make_tensors(0)
    for number, layer in enumerate(layers.values()):
        layer.places = rows
        query = torch.randn(3, 2 * HEADS * SIZE)
        found = layer.forward(query, query[:, : HEADS * SIZE], query[:, : HEADS * SIZE])
        heads = query.view(3, HEADS, 2, SIZE)
        logits = torch.einsum("thgd,nhd->thgn", heads, tensors["keys"][number]) * SIZE**-0.5
        weights = (logits + tensors["bias"][number].T[:, None]).softmax(-1)
        expected = torch.einsum("thgn,nhd->thgd", weights, tensors["values"][number]).flatten(1)
        check_near(found, expected, 4 * SIZE + SLOTS)


def test_a_state_that_was_replaced_after_its_admission_fails_its_request_alone(
    vllm: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(folder)
    connector = make_connector(vllm, config)
    old = ask(config, [1, 2])
    path = folder / "states/talk.kv.safetensors"
    write_slots(path, make_head(commit="c1"), make_tensors(1))
    layers = make_layers()
    assert load(connector, old, 0, [3, 4, 5, 6], layers) == {3, 4, 5, 6}
    assert caplog.messages == ["state talk: the state was replaced meanwhile"]
    new = ask(config, [1, 2])
    assert new.cache_salt == "c1"
    assert load(connector, new, 0, [7, 8, 9, 10], layers) == set()
    path.unlink()
    assert load(connector, new, 0, [7, 8, 9, 10], layers) == {7, 8, 9, 10}
    assert "there is no state talk" in caplog.messages[-1]
    # All of it may be in the cache of the engine.
    assert connector.get_num_new_matched_tokens(schedule(new), SLOTS) == (0, False)


def test_without_the_bias_heads_stay_narrow_and_free_slots_are_refused(
    vllm: Any, folder: Path
) -> None:
    config = make_config(folder, bias=False)
    sys.modules["vllm.config"].now = config  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="free slots"):
        ask(config, [1, 2])
    tensors = make_tensors(0) | {"bias": torch.zeros(LAYERS, SLOTS, HEADS)}
    path = folder / "states/talk.kv.safetensors"
    write_slots(path, make_head(biased=False, free=False), tensors)
    layers = make_layers()
    assert load(make_connector(vllm, config), ask(config, [1]), 0, [0, 1, 2], layers) == set()
    assert torch.equal(layers["layer.1"].kv_cache[0, :SLOTS], tensors["keys"][1])


def test_engines_that_would_answer_wrongly_do_not_start(vllm: Any, folder: Path) -> None:
    def refuse(why: str, config: Any, groups: Any = None) -> None:
        with pytest.raises(ValueError, match=why):
            make_connector(vllm, config, groups)

    config = make_config(folder)
    sliding = SimpleNamespace(kv_cache_spec=object(), layer_names=[])
    refuse("without full attention", config, [sliding])
    refuse("without full attention", config, [sliding, sliding])
    config.parallel_config.world_size = 2
    refuse("one worker", config)
    config = make_config(folder)
    config.cache_config.cache_dtype = "fp8_e4m3"
    refuse("quantized", config)
    config = make_config(folder)
    config.kv_transfer_config.kv_load_failure_policy = "recompute"
    refuse("kv_load_failure_policy", config)
    with pytest.raises(StateNotFound, match="no folder of states"):
        make_connector(vllm, make_config(folder / "nowhere"))


def test_nothing_is_imported_that_the_environment_of_vllm_lacks() -> None:
    # What protokv asks for and vLLM does not bring; and transformers, of which it has another one.
    lacking = "av decord jinja2 obstore rich starlette tokenizers transformers typer uvicorn xxhash"
    program = f"""
import sys
from types import ModuleType
class A:
    pass
A.KVConnectorBase_V1 = A.KVConnectorMetadata = object
lacking = {[*lacking.split(), "zarr", "PIL", "msgspec", "filelock", "charset_normalizer"]}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in lacking:
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Blocker())
for name in {list(STAND_INS)}:
    sys.modules[name] = ModuleType(name)
    for one in ("FullAttentionSpec", "VLLMValidationError", "get_current_vllm_config", "base"):
        setattr(sys.modules[name], one, A)
import protokv.vllm
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
