"""States in vLLM: a connector that puts the slots of a state into its paged cache, attention that
reads their bias, and the door by which a request names a state. All that touches vLLM is here.

A request with `kv_transfer_params={"state": "talk"}` reads `talk.kv.safetensors` of the folder
`states` in `kv_connector_extra_config`. Its prompt stands behind the N slots, which are for the
engine N tokens that were computed elsewhere: `_admit` puts N ids in front of it. The commit of the
state is the salt of the prefix cache, so that two states never hit each other's blocks. No kernel
adds a bias to a key, so heads get columns that do; `"bias": false` leaves out both. Nothing is
imported that the environment of vLLM lacks. It calls this interface subject to change; 0.31 and
0.32 were tried.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, wraps
from inspect import signature
from typing import Any

import torch
from torch.nn import functional
from vllm.config import get_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.exceptions import VLLMValidationError
from vllm.v1.kv_cache_interface import FullAttentionSpec

from protokv.backbones.files import digest_known_weights
from protokv.device.kernels import make_bias_columns
from protokv.errors import ProtoKVError, StateMismatch, escape_text
from protokv.slots import SlotsFile, SlotsFolder

_COLUMNS = 3  # that `make_bias_columns` makes
# Sizes of heads that attention on a CPU takes; other kernels take any multiple of 8.
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_open_folder = cache(SlotsFolder)


@dataclass(frozen=True, slots=True)
class _Load:
    """Slots of a commit of a state from `start` on, and the blocks of the request."""

    state: str
    commit: str
    start: int
    blocks: list[int]


class _Loads(list[_Load], base.KVConnectorMetadata):  # type: ignore[misc]
    """What a worker loads before the next forward."""


class ProtoKVConnector(base.KVConnectorBase_V1):  # type: ignore[misc]
    """Gives requests the slots of the states that they name. Saves nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Refuse, before the engine runs, what would answer wrongly. ValueError."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        full = len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec
        fails = vllm_config.kv_transfer_config.kv_load_failure_policy == "fail"
        for wrong, why in (
            (
                not register.cache_info().currsize,
                "pip install --no-deps protokv, so that vLLM finds its plug-in",
            ),
            (not full, "this model has layers without full attention, and states have none of it"),
            (vllm_config.parallel_config.world_size > 1, "it serves one worker, not several"),
            (vllm_config.cache_config.cache_dtype.startswith("fp8"), "its cache is not quantized"),
            (not fails, 'kv_load_failure_policy must be "fail"'),
        ):
            if wrong:
                raise ValueError(f"protokv.vllm: {why}")
        self._layers = list(groups[0].layer_names)
        self._block = vllm_config.cache_config.block_size
        self._states = SlotsFolder(_find_settings(vllm_config)["states"])
        self._pending = _Loads()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many slots a request lacks, which are loaded before its forward."""
        asked = request.kv_transfer_params or {}
        slots = asked["slots"] if "state" in asked else 0
        return max(slots - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note what to load where."""
        if num_external_tokens:
            asked = request.kv_transfer_params
            start = asked["slots"] - num_external_tokens
            into = blocks.get_block_ids()[0]
            self._pending.append(_Load(asked["state"], asked["commit"], start, into))

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        """Return what was noted since the last step."""
        loads = self._pending
        self._pending = _Loads()
        return loads

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Write slots into the cache of each layer, by the writer of its attention."""
        self._failed = set[int]()
        for load in self._get_connector_metadata():
            try:
                found = self._states.open(load.state)
                if found.head.commit != load.commit:
                    raise StateMismatch("the state was replaced meanwhile")
                place = torch.arange(load.start, found.head.slots)
                slots = torch.tensor(load.blocks)[place // self._block] * self._block
                slots += place % self._block
                for number, name in enumerate(self._layers):
                    layer = forward_context.no_compile_layers[name]
                    _write(layer, found, number, load.start, slots.to(layer.kv_cache.device))
            except (ProtoKVError, OSError) as error:
                logging.getLogger(__name__).warning("state %s: %s", load.state, error)
                self._failed.update(load.blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of states that went away: "Internal server error" to their requests."""
        return self._failed

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """Do nothing: all is loaded before a forward, and nothing is saved."""

    wait_for_layer_load = save_kv_layer
    wait_for_save = save_kv_layer


def _write(layer: Any, found: SlotsFile, number: int, start: int, slots: torch.Tensor) -> None:
    """Write the slots of a layer from `start` on to the places `slots` `[n]` int64 of its cache."""
    cache = layer.kv_cache
    more = layer.head_size - found.head_size
    keys = functional.pad(found.read(number, "keys", start).to(cache), (0, more))
    values = functional.pad(found.read(number, "values", start).to(cache), (0, more))
    if more:
        bias = found.read(number, "bias", start)
        columns = make_bias_columns(bias, layer.impl.scale, cache.dtype)
        keys[..., found.head_size : found.head_size + _COLUMNS] = columns
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)


def _find_settings(vllm_config: Any) -> dict[str, Any]:
    """Return the settings of this connector; empty: another one serves, or none."""
    transfer = vllm_config.kv_transfer_config
    ours = transfer is not None and transfer.kv_connector_module_path == __name__
    return {"states": "", "bias": True} | transfer.kv_connector_extra_config if ours else {}


@cache
def register() -> None:
    """Let attention read a bias, and requests name a state. vLLM calls it in each of its processes;
    a server without this connector stays as it is.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.engine.input_processor import InputProcessor

    Attention.__init__ = _widen(Attention.__init__)
    Attention.forward = _read_bias(Attention.forward)
    InputProcessor.process_inputs = _admit(InputProcessor.process_inputs)


def _widen(make: Any) -> Any:
    form = signature(make)

    @wraps(make)
    def make_wide(*given: Any, **named: Any) -> None:
        bound = form.bind(*given, **named)
        narrow = bound.arguments["head_size"]
        config = get_current_vllm_config()
        if _find_settings(config).get("bias"):
            on_cpu = config.device_config.device_type == "cpu"
            sizes = _CPU_HEADS if on_cpu else range(narrow // 8 * 8, 264, 8)
            bound.arguments["head_size"] = next(one for one in sizes if one >= narrow + _COLUMNS)
        make(*bound.args, **bound.kwargs)
        given[0].narrow_size = narrow

    return make_wide


def _read_bias(attend: Any) -> Any:
    @wraps(attend)
    def attend_wide(self: Any, query: Any, key: Any, value: Any, **named: Any) -> Any:
        more = self.head_size - self.narrow_size
        if not more:
            return attend(self, query, key, value, **named)

        def fill(rows: torch.Tensor, number: float) -> torch.Tensor:
            heads = rows.reshape(len(rows), -1, self.narrow_size)
            return functional.pad(heads, (0, more), value=number).flatten(1)

        # A query reads the sum of the columns of a key; those of the engine's own keys are 0.
        out = attend(self, fill(query, 1.0), fill(key, 0.0), fill(value, 0.0))
        return out.view(len(out), -1, self.head_size)[..., : self.narrow_size].flatten(1)

    return attend_wide


def _admit(process: Any) -> Any:
    @wraps(process)
    def admit(*given: Any, **named: Any) -> Any:
        request = process(*given, **named)
        config = given[0].vllm_config
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        asked = extra.get("kv_transfer_params") or {}
        settings = _find_settings(config)
        if "state" not in asked or not settings:
            return request
        try:
            states = _open_folder(settings["states"])
            found = states.open(asked["state"], lambda one: _check_state(one, config))
            head = found.head
            _check_request(request, head.slots, config.model_config.max_model_len)
            if asked.get("commit", head.commit) != head.commit:
                raise StateMismatch("another commit of it is there")
        except (ProtoKVError, OSError) as error:
            raise VLLMValidationError(f"state {escape_text(asked['state'])}: {error}") from None
        known = {"state": asked["state"], "commit": head.commit, "slots": head.slots}
        request.sampling_params.extra_args = {**extra, "kv_transfer_params": known}
        request.prompt_token_ids = [*head.fill_slots(), *request.prompt_token_ids]
        request.cache_salt = head.commit + (request.cache_salt or "")
        return request

    return admit


def _check_state(found: SlotsFile, vllm_config: Any) -> None:
    """Refuse a state that another model made, or a damaged one. StateError."""
    model = vllm_config.model_config
    layers = model.get_num_layers(vllm_config.parallel_config)
    shape = (layers, model.get_total_num_kv_heads(), model.get_head_size())
    found.check_model(digest_known_weights(str(model.model)), shape)
    if found.head.free and not _find_settings(vllm_config)["bias"]:
        raise StateMismatch('some of its heads have free slots, which take {"bias": true}')
    found.verify()


def _check_request(request: Any, slots: int, most: int) -> None:
    """Refuse a request that a state cannot answer. StateMismatch."""
    params = request.sampling_params
    asked = len(request.prompt_token_ids or ())
    whole = slots + asked + (params.max_tokens or 1)
    for wrong, why in (
        (not asked, "the question is empty"),
        (request.mm_features, "a question has no pictures"),
        (params.prompt_logprobs is not None, "its slots have no log probabilities"),
        (whole > most, f"with {slots} slots it takes {whole} tokens; max_model_len is {most}"),
    ):
        if wrong:
            raise StateMismatch(why)
