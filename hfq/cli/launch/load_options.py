"""Options of `hfq launch`, `hfq serve`, and `hfq chat`: those of every load in the program."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import typer

from hfq.cli.typed_options import parse_device_map, parse_max_memory
from hfq.errors import HfqError
from hfq.launch_environment import CONFIG, read_options

__all__ = ["load_options", "resolve_options", "with_load_options"]

Text = str | None


def load_options(
    *,
    config: Annotated[
        Text, typer.Option(envvar=CONFIG, show_envvar=False, metavar="FILE", help="Read options from JSON.")
    ] = None,
    device_map: Annotated[Text, typer.Option(help="Device map: auto, cpu, disk, cuda:0, or JSON.")] = None,
    max_memory: Annotated[
        Text, typer.Option(metavar="DEVICE=SIZE,…", help="Limits for an automatic map: cpu=8GiB,0=20GiB.")
    ] = None,
    offload_folder: Annotated[
        Text, typer.Option(metavar="FOLDER", help="Folder for layers on disk that are quantized on load.")
    ] = None,
    quantize_weights: Annotated[
        Text,
        typer.Option(metavar="METHOD", help="Quantize float checkpoints on load: fp8, w8a16, or JSON."),
    ] = None,
    quantize_output_head: Annotated[
        Text, typer.Option(metavar="fp8|int8", help="Round the output head on load, which changes results.")
    ] = None,
    modules_to_not_convert: Annotated[
        list[str] | None, typer.Option(metavar="MODULE", help="Module that stays unquantized; repeatable.")
    ] = None,
    quantize_activations: Annotated[
        bool | None,
        typer.Option("--quantize-activations", help="Quantize activations as the checkpoint declares."),
    ] = None,
    llm_int8_threshold: Annotated[
        float | None, typer.Option(help="Amplitude from which LLM.int8() leaves a channel unquantized.")
    ] = None,
    kernel: Annotated[Text, typer.Option(help="Kernel: auto, cpp, torch, or reference.")] = None,
    cpu_memory: Annotated[Text, typer.Option(help="Weights on the CPU: mmap, private, or shared.")] = None,
    disk_io: Annotated[Text, typer.Option(help="Reads of weights on disk: direct or buffered.")] = None,
    disk_checksum: Annotated[Text, typer.Option(help="Checksums of reads: off, first, or always.")] = None,
    expert_cache_size: Annotated[
        Text, typer.Option(metavar="SIZE", help="Memory for offloaded experts, such as 4GiB.")
    ] = None,
    execute_cpu_layers_on: Annotated[
        Text, typer.Option(help="Device of layers on the CPU: accelerator, cpu, or auto.")
    ] = None,
    reader_ranks: Annotated[Text, typer.Option(help="Ranks that read under ZeRO-3: all or rank0.")] = None,
    nvme_source: Annotated[
        Text, typer.Option(help="Files of ZeRO-3 on NVMe: checkpoint or swap_files.")
    ] = None,
) -> str:
    """Returns the options of a command line as JSON, for `HFQ_CONFIG`.

    Raises:
        HfqError: An option is unknown or has an invalid value.
    """
    given = {name: value for name, value in locals().items() if value not in (None, [])}
    return _resolved_elsewhere(given) if given else ""


def with_load_options(run: Callable[..., None]) -> Callable[..., None]:
    """Returns a verb that has all options of `load_options`, and passes them on as `options`.

    Args:
        run: The function of the verb. Its parameter `options` receives the result of `load_options`.
    """
    own = [each for each in inspect.signature(run).parameters.values() if each.name != "options"]
    shared = inspect.signature(load_options).parameters

    def verb(**given: Any) -> None:
        options = load_options(**{name: given.pop(name) for name in shared})
        run(**given, options=options)

    hints = {**get_type_hints(load_options, include_extras=True), **get_type_hints(run, include_extras=True)}
    parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in (*own, *shared.values())]
    verb.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(annotation=hints[each.name]) for each in parameters]
    )
    verb.__annotations__ = {each.name: hints[each.name] for each in parameters}
    verb.__doc__ = run.__doc__
    return verb


def _resolved_elsewhere(given: Mapping[str, Any]) -> str:
    """Returns the result of `resolve_options` in another process.

    It imports torch, which takes memory and starts threads. The process that waits for the program must have
    no other threads: one of them could receive its signals.
    """
    with tempfile.TemporaryFile() as answers:
        descriptor = answers.fileno()
        command = [sys.executable, "-c", f"from {__name__} import answer; answer({descriptor})"]
        subprocess.run(command, input=pickle.dumps(dict(given)), pass_fds=[descriptor], check=True)
        answers.seek(0)
        found = pickle.load(answers)
    if isinstance(found, HfqError):
        raise found
    return found


def answer(descriptor: int) -> None:
    """Reads options from standard input, and writes what `resolve_options` returns or raises.

    Args:
        descriptor: File to write to. Standard output is open to every imported module.
    """
    try:
        found: str | HfqError = resolve_options(pickle.load(sys.stdin.buffer))
    except HfqError as error:
        found = error
    with os.fdopen(descriptor, "wb") as answers:
        pickle.dump(found, answers)


def _of_file(error: HfqError, source: str) -> HfqError:
    """Returns an error about an option that names where the option comes from."""
    start = "The options in "  # such messages name the keys, not the options of the command line
    named = error.message.startswith(start)
    return type(error)(
        error.message if named else f"{start}{source} are not valid: {error.message}",
        expected=error.expected,
        found=error.found,
        problems=error.problems,
        fix=error.fix,
    )


def resolve_options(given: Mapping[str, Any]) -> str:
    """Returns the options of a config file and of a command line as one JSON object.

    Args:
        given: Options of the command line by their names in Python; `config` is the file.

    Raises:
        HfqError: An option is unknown or has an invalid value.
    """
    from hfq.integrations.transformers.launched_loads import LaunchOptions

    typed = dict(given)
    file = typed.pop("config", "")
    source = file if not file.lstrip().startswith("{") else CONFIG
    options = read_options(file, "--config")
    try:
        LaunchOptions.of(options, source)
    except HfqError as error:
        raise _of_file(error, source) from error
    if "device_map" in typed:
        typed["device_map"] = parse_device_map(typed["device_map"])
    if "max_memory" in typed:
        limits = parse_max_memory(typed["max_memory"])
        typed["max_memory"] = {device.rpartition(":")[2]: nbytes for device, nbytes in limits.items()}
    if typed.get("quantize_weights", "").startswith("{"):
        typed["quantize_weights"] = read_options(typed["quantize_weights"], "--quantize-weights")
    options |= typed
    LaunchOptions.of(options)
    if options.get("offload_folder") is not None:  # the program may change its folder
        options["offload_folder"] = os.path.abspath(options["offload_folder"])
    return json.dumps(options)
