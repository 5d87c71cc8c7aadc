"""Patches of transformers, each with the upstream code that requires it.

All patches act only on models with an `HfqConfig`. Tested with transformers 5.17.0 and 5.23.0.

1. `modeling_utils.get_hf_quantizer` (quantizers/auto.py). Upstream rejects a config of another class than the
   checkpoint's ("The model is quantized with X but you are passing a HfqConfig config",
   `merge_quantization_configs`). It skips unknown methods with a warning. hfq uses the checkpoint's config as
   its source instead. `hfq.pretrained_config` needs no patch.
2. `PreTrainedModel.from_pretrained` and `_BaseAutoModelClass.from_pretrained`. Upstream opens files before it
   calls a quantizer. A wrong path, a damaged shard, or an impossible size then appears as an error of another
   library, or ends the process. hfq validates a local folder first, and raises an error for unsupported
   arguments. Upstream accepts the device `"disk"` only in a dict; hfq makes one of the word. Loads wait for
   each other, because upstream replaces class attributes while it builds a model (`init.no_tie_weights`). Two
   simultaneous loads would leave them replaced, and later models would not be tied. `trust_remote_code` is
   False if the caller gives none, because upstream would ask the user.
3. `modeling_utils._get_resolved_checkpoint_files`. The files of a model on the Hub are known only here,
   before the model is built. hfq validates them in the same way as a local folder. A shard's name must lead
   to a place inside the folder.
4. `PreTrainedModel.device`, only of offloaded models. Upstream returns the device of the first parameter. For
   a parameter on disk this is `meta`, and `inputs.to(model.device)` fails. `PreTrainedModel.dtype` of models
   whose first layer is quantized. Upstream returns the dtype of the first floating parameter, such as that of
   FP8 codes, casts inputs to it, and saves it in config.json.
5. `PreTrainedModel.save_pretrained`, of models that hfq loaded. Upstream does not let a quantizer choose the
   files to write. Side files of other tools (quanto_qmap.json, quantize_config.json, …) would be lost. A
   config.json without a quantization would get one. Upstream also empties files of an older checkpoint
   before the new ones are complete.
6. `PreTrainedModel.prepare_distribute_model` (distributed/mixin.py) creates the meshes of a tensor-parallel
   load before anything is opened. A rank that fails must join this before it can report its error to the
   others, so hfq records the call.
7. `PreTrainedModel.num_parameters` and `get_memory_footprint`, of models that hfq loaded. Upstream counts
   stored words, and skips weights on disk.
8. `modeling_utils.accelerate_dispatch`, of models over several accelerators. accelerate's hooks would move
   quantized and offloaded tensors.
9. `modeling_utils.PreTrainedModel._load_pretrained_model`. Upstream opens, sorts, and renames every stored
   tensor, also those that hfq has loaded itself. It reads GGUF files itself, refuses another quantizer than
   its own (`get_hf_quantizer`), and knows no split file. hfq keeps `gguf_file` from upstream, and gives it
   the unquantized tensors.
10. `PreTrainedConfig._get_config_dict`. Upstream builds a config of any size, which may take all memory, and
   before the files of a model on the Hub are known. config.json may also name another file to use instead.
   hfq checks the JSON of each.
11. `PreTrainedModel.from_pretrained`, with `HFQ_ENABLE=1` in the environment. Upstream gives a program that
   names no quantizer that of the checkpoint. hfq passes an `HfqConfig` instead (launched_loads.py).
12. `PreTrainedModel.resize_token_embeddings`, of models that hfq loaded. Upstream resizes the embedding, and
   then raises an error for a quantized head (embedding_resize.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hfq.checkpoint import Checkpoint
from hfq.checkpoint.index import check_inside
from hfq.errors import HfqError, SetupError
from hfq.formats.configs.source_config import as_source, source_config
from hfq.import_hook import run_pending
from hfq.integrations.deepspeed.scatter import described_folder
from hfq.integrations.deepspeed.start_ranks import start_distributed
from hfq.integrations.hub.gguf_files import download_gguf
from hfq.integrations.transformers.attention import register_attention
from hfq.integrations.transformers.embedding_resize import checking_resize
from hfq.integrations.transformers.interpreter import pausing_collection
from hfq.integrations.transformers.launched_loads import applying_launch_options
from hfq.integrations.transformers.load_lock import one_load
from hfq.loading.argument_checks import check_arguments, open_local, take_gguf_file
from hfq.loading.config import METHOD, HfqConfig
from hfq.loading.config_checks import check_config, check_sizes
from hfq.loading.context import load_context, opened_checkpoint, remember_checkpoint, within_load
from hfq.loading.custom_code import refusing_custom_code
from hfq.loading.gguf.metadata_config import config_of_gguf
from hfq.loading.load_errors import as_hfq_error, naming_accelerators
from hfq.loading.mapped_tensors import map_named
from hfq.loading.model_size import is_loaded_by_hfq, memory_footprint, num_parameters
from hfq.loading.page_cache import filling_page_cache
from hfq.loading.quantize_on_load.requirements import check_quantize_on_load
from hfq.loading.ranks import failing_together, is_zero3
from hfq.loading.tensor_parallel.slices import asks_for_ranks, check_distributed, joining, noting_meshes
from hfq.loading.whole_save import staged_save
from hfq.modules.offloaded_parameter import OffloadedParameter

__all__ = ["patch_auto_factory", "patch_modeling_utils"]

_pool_process = os.getpid()  # the process in which torch's thread pool was made


def patch_modeling_utils(module: Any) -> None:
    """Applies patches 1, 3, and 5 to 12, and 2 for model classes; registers hfq's attention."""
    register_attention()
    if not hasattr(module.get_hf_quantizer, "__wrapped__"):
        module.get_hf_quantizer = _taking_over(module.get_hf_quantizer)
        module._get_resolved_checkpoint_files = _validating(module._get_resolved_checkpoint_files)
        module.accelerate_dispatch = _dispatching(module.accelerate_dispatch)
        supplying = _supplying(module.PreTrainedModel._load_pretrained_model)
        module.PreTrainedModel._load_pretrained_model = staticmethod(supplying)
        reading = module.PreTrainedConfig._get_config_dict.__func__
        module.PreTrainedConfig._get_config_dict = classmethod(_checking(reading))
        _guard(module.PreTrainedModel)
        guarding = module.PreTrainedModel.from_pretrained.__func__
        module.PreTrainedModel.from_pretrained = classmethod(applying_launch_options(guarding))
        module.PreTrainedModel.save_pretrained = _completing(module.PreTrainedModel.save_pretrained)
        resizing = checking_resize(module.PreTrainedModel.resize_token_embeddings)
        module.PreTrainedModel.resize_token_embeddings = resizing
        for name, count in (("num_parameters", num_parameters), ("get_memory_footprint", memory_footprint)):
            setattr(module.PreTrainedModel, name, _counting(getattr(module.PreTrainedModel, name), count))
        if hasattr(module.PreTrainedModel, "prepare_distribute_model"):
            prepare = module.PreTrainedModel.prepare_distribute_model.__func__
            module.PreTrainedModel.prepare_distribute_model = classmethod(noting_meshes(prepare))


def patch_auto_factory(module: Any) -> None:
    """Applies patch 2 to the auto classes.

    Existing auto classes have copied the method of the base; future ones will copy the patched one.
    """
    owners = [module._BaseAutoModelClass]
    for owner in owners:
        owners += owner.__subclasses__()
        if "from_pretrained" in owner.__dict__ and not hasattr(
            owner.__dict__["from_pretrained"].__func__, "_hfq_guards"
        ):
            _guard(owner)


def _taking_over(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        stored = getattr(config, "quantization_config", None)
        chosen = _as_hfq(quantization_config) or (_as_hfq(stored) if quantization_config is None else None)
        if chosen is not None:
            quantization_config = chosen._with_source(_take_source(config))
        return original(config, quantization_config, *args, **kwargs)

    return get_hf_quantizer


def _validating(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_resolved_checkpoint_files(*args: Any, **kwargs: Any) -> Any:
        if not load_context().is_active:
            return original(*args, **kwargs)
        named = kwargs.get("transformers_explicit_filename")
        if named is not None:
            check_inside("config.json", [str(named)])
        checkpoint = load_context().checkpoint
        is_adapter = str(named).startswith("adapter_model.")  # loaded last, and often from another folder
        if checkpoint is not None and checkpoint.gguf is not None and not is_adapter:
            return [*checkpoint.headers], None
        resolved = original(*args, **kwargs)
        files, metadata = resolved
        if files and all(file.endswith(".safetensors") for file in files):
            check_inside("the index", (metadata or {}).get("weight_map", {}).values())
            if is_adapter:
                Checkpoint.from_files(files)
                return resolved
            checkpoint = opened_checkpoint(files)
            check_sizes(checkpoint, load_context().chooses_attention)
            remember_checkpoint(checkpoint)
        return resolved

    return get_resolved_checkpoint_files


def _supplying(original: Callable) -> Callable:
    @functools.wraps(original)
    def load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        loading = getattr(load_config.hf_quantizer, "loading", None)
        is_adapter = getattr(loading, "load_seconds", None) is not None  # loaded later, from its own files
        if state_dict is None and loading is not None and not is_adapter:
            is_copied = bool(getattr(load_config, "disable_mmap", False))
            state_dict = map_named(loading.checkpoint, loading.reader, loading.names_to_load(), is_copied)
        return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    return load_pretrained_model


def _dispatching(original: Callable) -> Callable:
    @functools.wraps(original)
    def accelerate_dispatch(model: Any, hf_quantizer: Any, *args: Any, **kwargs: Any) -> Any:
        loading = getattr(hf_quantizer, "loading", None)
        if loading is None:
            return original(model, hf_quantizer, *args, **kwargs)
        with loading.with_experts(), loading.without_offloaded():
            return original(model, hf_quantizer, *args, **kwargs)

    return accelerate_dispatch


def _checking(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_config_dict(cls: type, path: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(cls, path, *args, **kwargs)
        context = load_context()
        if context.is_active and found[0] is not None:
            check_config(found[0], f"{path}/config.json", context.checkpoint, context.chooses_attention)
        return found

    return get_config_dict


def _counting(original: Callable, count: Callable) -> Callable:
    @functools.wraps(original)
    def counted(self: Any, *args: Any, **kwargs: Any) -> int:
        return (count if is_loaded_by_hfq(self) else original)(self, *args, **kwargs)

    return counted


def _completing(original: Callable) -> Callable:
    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        loading = getattr(getattr(self, "hf_quantizer", None), "loading", None)
        if loading is None or not hasattr(loading, "saved_like_source"):
            _check_is_no_part(self, save_directory)
            return original(self, save_directory, *args, **kwargs)
        if kwargs.get("distributed_checkpoint"):
            raise SetupError(
                "distributed_checkpoint=True does not support quantized layers. Nothing was saved.",
                file=save_directory,
                expected="distributed_checkpoint=False",
                found="True",
                fix="Leave it out. Rank 0 then writes the whole quantized model.",
            )
        with (
            _folder_of_save(save_directory, kwargs) as folder,
            loading.saved_like_source(self, folder, kwargs.get("is_main_process", True)) as is_written_here,
        ):
            return original(self, folder, *args, **kwargs) if is_written_here else None

    return save_pretrained


def _folder_of_save(folder: str | os.PathLike, kwargs: dict) -> contextlib.AbstractContextManager:
    """Returns the context manager of a save, which yields the folder to write.

    That is `folder` itself if other ranks or the Hub take part in the save.
    """
    is_shared = dist.is_available() and dist.is_initialized()
    if is_shared or kwargs.get("push_to_hub") or os.path.isfile(folder):
        return contextlib.nullcontext(folder)
    return staged_save(folder)


def _check_is_no_part(model: Any, folder: str | os.PathLike) -> None:
    """Raises an error for an offloaded part of a model, before its config is written."""
    found = next(
        (name for name, tensor in model.named_parameters() if isinstance(tensor, OffloadedParameter)), None
    )
    if found is not None:
        raise SetupError(
            f"{type(model).__name__} is an offloaded part of a model and cannot be saved alone. Nothing was "
            "saved.",
            file=folder,
            tensor=found,
            expected="the whole model that from_pretrained returned",
            found=f"{found}, which is offloaded",
            fix="Call save_pretrained of the whole model, or load it without disk in device_map.",
        )


def _as_hfq(config: Any) -> HfqConfig | None:
    if isinstance(config, type) and issubclass(config, HfqConfig):
        raise SetupError(
            "quantization_config is the class HfqConfig, not an object of it. Nothing was loaded.",
            expected="HfqConfig()",
            found="HfqConfig",
            fix="Pass quantization_config=HfqConfig().",
        )
    if isinstance(config, dict) and config.get("quant_method") == METHOD:
        return HfqConfig.from_dict(config)
    return config if isinstance(config, HfqConfig) else None


def _take_source(config: Any) -> dict | None:
    """Removes the checkpoint's quantization_config from a private model config; returns it."""
    for owner in (config, config.get_text_config(decoder=True)):
        stored = getattr(owner, "quantization_config", None)
        if stored is not None:
            del owner.quantization_config
            hfq = _as_hfq(stored)
            if hfq is not None:
                return hfq._source
            return stored.to_dict() if hasattr(stored, "to_dict") else as_source(stored)
    return None


def _renew_thread_pool() -> None:
    """Creates a new thread pool of torch in the child of a fork.

    Otherwise the first threads of a load would create it at the same time, and torch then fails now and
    then ("Invalid thread pool!").
    """
    global _pool_process
    if os.getpid() != _pool_process:
        torch.set_num_threads(torch.get_num_threads())
        _pool_process = os.getpid()


def _guard(owner: type) -> None:
    original = owner.from_pretrained.__func__  # type: ignore[attr-defined]

    @functools.wraps(original)
    def from_pretrained(
        cls: Any, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        def load(path: Any) -> Any:
            return original(cls, path, *args, **kwargs)

        asked = kwargs.get("quantization_config")
        if asked is None:
            asked = getattr(kwargs.get("config"), "quantization_config", None)
        chosen = _as_hfq(asked)
        if load_context().is_active or chosen is None:
            return load(pretrained_model_name_or_path)
        path, gguf_file = take_gguf_file(pretrained_model_name_or_path, kwargs)
        if kwargs.get("trust_remote_code") is None:
            kwargs["trust_remote_code"] = False
        if kwargs.get("device_map") == "disk":
            kwargs["device_map"] = {"": "disk"}  # transformers accepts the word only in a dict
        if chosen.reader_ranks == "rank0" and is_zero3():
            with (
                described_folder(path, kwargs.get("variant"), gguf_file) as folder,
                failing_together(start_distributed),
            ):
                return _guarded(load, folder, kwargs, chosen, gguf_file)
        if is_zero3():
            together: contextlib.AbstractContextManager = failing_together(start_distributed)
        else:
            together = (
                failing_together(joining(kwargs)) if asks_for_ranks(kwargs) else contextlib.nullcontext()
            )
        with together:
            return _guarded(load, path, kwargs, chosen, gguf_file)

    from_pretrained._hfq_guards = True  # type: ignore[attr-defined]
    owner.from_pretrained = classmethod(from_pretrained)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _hiding_counts() -> Iterator[None]:
    """A context manager for a load without accelerate's warnings of absent accelerators.

    accelerate counts the accelerators of some kinds alone (`get_max_memory`, accelerate 1.15), and
    `check_arguments` refuses absent ones.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return "is not available, available devices are" not in record.getMessage()

    logger = logging.getLogger("accelerate.utils.modeling")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@pausing_collection()
def _guarded(
    load: Callable[[Any], Any],
    path: Any,
    kwargs: dict[str, Any],
    chosen: HfqConfig,
    gguf_file: str | None,
) -> Any:
    """Runs one load with hfq: checks first, no other load at the same time, one kind of error."""
    from transformers import GenerationConfig  # transformers imports this file during its own import

    check_arguments(kwargs)
    check_distributed(kwargs, chosen.cpu_memory)
    if chosen.recipe is not None:
        check_quantize_on_load(chosen, asks_for_ranks(kwargs))
    checkpoint = open_local(path, kwargs, gguf_file)
    if checkpoint is None and gguf_file is not None:
        checkpoint = Checkpoint.open(download_gguf(path, gguf_file, kwargs), gguf_file=gguf_file)
    chooses_attention = isinstance(kwargs.get("attn_implementation"), str)
    if checkpoint is not None:
        check_sizes(checkpoint, chooses_attention)
        source_config(checkpoint)
    context = within_load(
        is_active=True,
        checkpoint=checkpoint,
        key_mapping=kwargs.get("key_mapping"),
        ignores_sizes=bool(kwargs.get("ignore_mismatched_sizes")),
        experts_implementation=kwargs.get("experts_implementation"),
        offload_folder=kwargs.get("offload_folder"),
        max_memory=kwargs.get("max_memory"),
        strategy=kwargs["device_map"] if isinstance(kwargs.get("device_map"), str) else "auto",
        chooses_attention=chooses_attention,
    )
    whole = None if is_zero3() or asks_for_ranks(kwargs) or chosen.recipe is not None else checkpoint
    try:
        cache = filling_page_cache(whole, kwargs.get("device_map"), chosen.cpu_memory)
        named = naming_accelerators(path)
        with context, one_load(), cache, refusing_custom_code(path), named, _hiding_counts():
            _renew_thread_pool()
            config = config_of_gguf(path, checkpoint, kwargs)
            if checkpoint is not None and config is not None:
                kwargs["config"] = config
                # upstream looks for a generation config in config.json, which is not there
                if not checkpoint.config and kwargs.get("generation_config") is None:
                    kwargs["generation_config"] = GenerationConfig.from_model_config(config)
            return load(path)
    except HfqError:
        raise
    except Exception as error:
        raise as_hfq_error(path, error, kwargs, is_local=checkpoint is not None) from error


run_pending()
