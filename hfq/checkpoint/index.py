"""Tensors of a checkpoint folder as byte ranges.

Every header is validated before a tensor is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from hfq.checkpoint.gguf.named_model import GgufModel, open_gguf
from hfq.checkpoint.gguf.split_files import find_gguf, no_such_gguf, parts_of
from hfq.checkpoint.header import Header, HeaderLimits, read_header
from hfq.checkpoint.small_file import read_small_file
from hfq.errors import CheckpointError, FormatError, error_of_limit
from hfq.tensor_spec import TensorInfo

__all__ = [
    "HUB_FILE",
    "HUB_ID",
    "JSON_LIMIT",
    "Checkpoint",
    "check_inside",
    "parse_json",
    "read_json",
    "split_gguf_path",
    "weight_map_of",
]

JSON_LIMIT = 256 << 20
"""Most bytes of a JSON file."""

_DANGEROUS_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""The form `organization/model`."""

HUB_FILE = re.compile(rf"({HUB_ID.pattern})/(.+)")
"""The form `organization/model/file`."""


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint: files and tensors, without a model.

    Attributes:
        root: The folder.
        config: `config.json`, or empty without one.
        headers: The header of each file, by path.
        tensors: Every stored tensor by its checkpoint name; tensors of GGUF files by their name in the model.
        gguf: The model in GGUF files; None for safetensors.
    """

    root: str
    config: dict
    headers: dict[str, Header]
    tensors: dict[str, TensorInfo] = field(repr=False)
    gguf: GgufModel | None = None

    @classmethod
    def open(
        cls,
        root: str | os.PathLike,
        variant: str | None = None,
        limits: HeaderLimits = HeaderLimits(),  # noqa: B008
        gguf_file: str | None = None,
    ) -> Checkpoint:
        """Opens the checkpoint in a folder: `model.safetensors`, its shards, or a GGUF file.

        `transformers_weights` in config.json names another file or index, as in transformers.

        Args:
            root: The folder, or the path of a GGUF file.
            variant: As in `from_pretrained`: `model.<variant>.safetensors`.
            limits: Limits on each header.
            gguf_file: The name of a GGUF file in the folder, or of any part of a split.

        Raises:
            CheckpointError: The folder, a shard, or a header is missing or damaged, or a shard is outside the
                folder.
        """
        root, gguf_file = split_gguf_path(root, gguf_file)
        root = Path(root)
        if not os.path.lexists(root):
            fix = "Check the path. A model on the Hub is named `organization/model`."
            if HUB_ID.fullmatch(str(root)):
                fix = f"Check the path. A model on the Hub: hf download {root} --local-dir {root}"
            raise CheckpointError(
                "There is no checkpoint at this path.",
                file=root,
                expected="a folder with config.json and *.safetensors",
                found="nothing",
                fix=fix,
            )
        if not root.is_dir():
            raise CheckpointError(
                "A checkpoint is a folder, but this is a file.",
                file=root,
                expected="a folder",
                found="a file",
                fix=f"Pass its folder, {root.absolute().parent}.",
            )
        if gguf_file is not None:
            check_inside("gguf_file", [gguf_file])
            return cls._from_gguf(root, root / gguf_file, limits)
        single, index = _weights_files(root, variant)
        if single is not None and os.path.lexists(single):
            return cls.from_files([single], root=root, limits=limits)
        if not os.path.lexists(index):
            file = find_gguf(root)
            if file is None:
                raise _no_weights(root)
            return cls._from_gguf(root, file, limits)
        _check_contained(root, index)
        weight_map = weight_map_of(read_json(index), index)
        files = [root / name for name in sorted(set(weight_map.values()))]
        for file in files:
            _check_exists(root, file)
        checkpoint = cls.from_files(files, root=root, limits=limits)
        _check_weight_map(weight_map, checkpoint, index)
        return checkpoint

    @classmethod
    def _from_gguf(cls, root: Path, file: Path, limits: HeaderLimits) -> Checkpoint:
        """Opens a GGUF file, or all parts of the split that it belongs to."""
        files = parts_of(file)
        for part in files:
            _check_exists(root, part)
        return cls.from_files(files, root=root, limits=limits)

    @classmethod
    def from_files(
        cls,
        files: Sequence[str | os.PathLike],
        root: str | os.PathLike | None = None,
        limits: HeaderLimits = HeaderLimits(),  # noqa: B008
    ) -> Checkpoint:
        """Opens the checkpoint that consists of these safetensors files, or of one GGUF model.

        Args:
            files: The shards; or a GGUF file, or all parts of a split in order.
            root: The folder that must contain them; None means the folder of the first.
            limits: Limits on each header.

        Raises:
            CheckpointError: As `open`.
        """
        if not files:
            raise CheckpointError(
                "A checkpoint has at least one file.",
                expected="*.safetensors",
                found="none",
                fix="Pass the checkpoint's files.",
            )
        root = Path(root) if root is not None else Path(files[0]).parent
        headers: dict[str, Header] = {}
        tensors: dict[str, TensorInfo] = {}
        for file in map(Path, files):
            _check_contained(root, file)
        if Path(files[0]).suffix == ".gguf":
            opened, model = open_gguf([*map(Path, files)], limits)
            checkpoint = cls(str(root), {}, {**opened}, {**model.tensors}, model)
            checkpoint.config.update(checkpoint.side_file("config.json") or {})
            return checkpoint
        for file in map(Path, files):
            header = read_header(file, limits)
            headers[str(file)] = header
            for name in header.tensors.keys() & tensors.keys():
                raise CheckpointError(
                    "Two shards hold the same tensor.",
                    file=file,
                    tensor=name,
                    found=tensors[name].range.file,
                    expected="each tensor in one shard",
                    fix="Remove the stale shard, or download the checkpoint again.",
                )
            tensors |= header.tensors
        checkpoint = cls(str(root), {}, headers, tensors)
        checkpoint.config.update(checkpoint.side_file("config.json") or {})
        return checkpoint

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(header.nbytes for header in self.headers.values())

    def check_safetensors(self, outcome: str) -> None:
        """Raises an error for a GGUF file, for code that reads stored tensors by itself.

        Args:
            outcome: The outcome for the message, such as "Nothing was written".

        Raises:
            FormatError: The checkpoint is a GGUF file.
        """
        if self.gguf is not None:
            raise FormatError(
                f"This operation does not support GGUF files. {outcome}.",
                file=next(iter(self.headers)),
                expected="a checkpoint in safetensors",
                found=f"a GGUF file of {self.gguf.architecture}",
                fix="Use a checkpoint of this model in safetensors.",
            )

    def side_file(self, name: str) -> dict | None:
        """Returns the JSON object of a side file (`quantize_config.json`, …), or None."""
        path = Path(self.root) / name
        if not os.path.lexists(path):
            return None
        _check_contained(Path(self.root), path)
        return read_json(path)

    def metadata(self) -> dict[str, str]:
        """The `__metadata__` entries of all files, except those that differ between files."""
        merged: dict[str, str] = {}
        disputed: set[str] = set()
        for header in self.headers.values():
            disputed |= {
                key for key, value in header.metadata.items() if merged.setdefault(key, value) != value
            }
        return {key: value for key, value in merged.items() if key not in disputed}


def split_gguf_path(
    path: str | os.PathLike, gguf_file: str | None = None
) -> tuple[str | os.PathLike, str | None]:
    """Returns the folder and the name of a GGUF file for the path of such a file.

    The file may be of a model on the Hub: `organization/model/file.gguf`. Other paths are returned with the
    given name.
    """
    path = os.fspath(path)
    is_model = os.path.isdir(path) or (HUB_ID.fullmatch(path) is not None and not os.path.lexists(path))
    if gguf_file is not None or not path.endswith(".gguf") or is_model:
        return path, gguf_file
    folder, name = os.path.split(path)
    on_hub = HUB_FILE.fullmatch(path)
    if on_hub is not None and not os.path.lexists(folder):
        return on_hub[1], on_hub[2]
    return folder or ".", name


def _weights_files(root: Path, variant: str | None) -> tuple[Path | None, Path]:
    """Returns the paths where a single file of weights (None for never) and an index may be."""
    infix = f".{variant}" if variant else ""
    single, index = root / f"model{infix}.safetensors", root / f"model.safetensors.index{infix}.json"
    config = root / "config.json"
    if not os.path.lexists(config):
        return single, index
    _check_contained(root, config)
    named = read_json(config).get("transformers_weights")
    if named is None:
        return single, index
    if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
        raise _not_safetensors(config, named)
    check_inside(config, [named])
    return (None, root / named) if named.endswith(".json") else (root / named, index)


def _no_weights(root: Path) -> CheckpointError:
    found = sorted(entry.name for entry in root.iterdir())[:12]
    pickles = [name for name in found if name.endswith(_DANGEROUS_SUFFIXES)]
    fix = "Check the path."
    if "config.json" in found:
        fix = f"Download the weights into the folder: hf download ORG/MODEL --local-dir {root}"
    if pickles:
        fix = "Convert the checkpoint to safetensors. hfq never opens a pickle."
    return CheckpointError(
        "The folder holds no checkpoint.",
        file=root,
        found=", ".join(found) or "an empty folder",
        expected="model.safetensors, model.safetensors.index.json, or a GGUF file",
        fix=fix,
    )


def read_json(path: Path) -> dict:
    """Reads the JSON object of a file.

    Raises:
        CheckpointError: The file cannot be read, or holds no JSON object.
    """
    try:
        return parse_json(read_small_file(path, JSON_LIMIT), path)
    except OSError as error:
        raise error_of_limit(error, path) or _unreadable_json(path, error) from None


def parse_json(raw: bytes, path: Path) -> dict:
    """Returns the JSON object of a file.

    Raises:
        CheckpointError: The file holds no JSON object.
    """
    try:
        value = json.loads(raw.decode("utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}")
        return value
    except (ValueError, RecursionError) as error:
        raise _unreadable_json(path, error) from None


def _unreadable_json(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        "A JSON file of the checkpoint cannot be read.",
        file=path,
        expected="a JSON object",
        found=error,
        fix="Download this file again.",
    )


def weight_map_of(value: dict, index: Path) -> dict[str, str]:
    """Returns the `weight_map` of an index: tensor → safetensors file, all inside the folder.

    Raises:
        CheckpointError: There is none, or it names a file outside the folder or not a safetensors file.
    """
    weight_map = value.get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(v, str) for v in weight_map.values())
    ):
        raise CheckpointError(
            "The index has no usable weight_map.",
            file=index,
            expected="{tensor: file}",
            found=repr(weight_map)[:80],
            fix="Download this file again.",
        )
    check_inside(index, weight_map.values())
    for name in sorted(set(weight_map.values())):
        if not name.endswith(".safetensors"):
            raise _not_safetensors(index, name)
    return weight_map


def _not_safetensors(file: Path, name: object) -> CheckpointError:
    return CheckpointError(
        f"{file.name} names a file that is not safetensors.",
        file=file,
        found=repr(name),
        expected="*.safetensors",
        fix="Convert the checkpoint to safetensors. hfq never opens a pickle.",
    )


def check_inside(file: object, names: Iterable[str]) -> None:
    """Checks that names in a file of a checkpoint lead to places inside the checkpoint's folder.

    Raises:
        CheckpointError: A name is an absolute path, or has `..` or a letter that no path requires.
    """
    for name in sorted(set(names)):
        path = PurePosixPath(name)
        if not name.isprintable() or "\\" in name or ":" in name or path.is_absolute() or ".." in path.parts:
            raise _outside(file, name)


def _check_weight_map(weight_map: dict[str, str], checkpoint: Checkpoint, index: Path) -> None:
    names = {file: Path(file).relative_to(checkpoint.root).as_posix() for file in checkpoint.headers}
    held = {name: names[info.range.file] for name, info in checkpoint.tensors.items()}
    if held == weight_map:
        return
    problems = [
        f"{name}: the index says {weight_map.get(name, 'nothing')}, the shards say "
        f"{held.get(name, 'nothing')}"
        for name in sorted(weight_map.keys() | held.keys())
        if weight_map.get(name) != held.get(name)
    ]
    if problems:
        raise CheckpointError(
            "The index and the shards disagree. Nothing was loaded.",
            file=index,
            problems=problems,
            fix="Download the checkpoint again.",
        )


def _outside(file: object, found: str) -> CheckpointError:
    return CheckpointError(
        "A file of the checkpoint is outside its folder.",
        file=file,
        found=repr(found),
        expected="a file inside the folder",
        fix="Put the real files into the folder. Only links of the Hub cache are followed.",
    )


def _check_exists(root: Path, file: Path) -> None:
    """Raises an error that names a missing file, or one whose link in the Hub cache dangles."""
    _check_contained(root, file)
    try:
        file.stat()
    except FileNotFoundError as error:
        if file.suffix == ".gguf" and parts_of(file) == [file] and not os.path.lexists(file):
            raise no_such_gguf(file) from error
        raise CheckpointError(
            f"Shard {file.relative_to(root).as_posix()} is missing. Nothing was loaded.",
            file=file,
            fix=f"Copy the file into the folder, or download it again with hf download {_name_on_hub(root)}.",
        ) from error
    except OSError:
        pass  # `read_header` reports the reason


def _name_on_hub(root: Path) -> str:
    """Returns the repository and the commit of a folder in the Hub cache, or a placeholder."""
    folder = Path(os.path.abspath(root))
    for snapshot in (folder, *folder.parents):
        repository = snapshot.parent.parent.name
        if snapshot.parent.name == "snapshots" and repository.startswith("models--"):
            name = repository.removeprefix("models--").replace("--", "/")
            return f"{name} --revision {snapshot.name}"
    return "ORG/MODEL"


def _check_contained(root: Path, file: Path) -> None:
    """Raises an error for a shard that resolves outside the folder.

    In the Hub cache a shard may resolve to the repository's blobs.
    """
    resolved = Path(os.path.realpath(file))
    real_root = Path(os.path.realpath(root))
    snapshots = [folder for folder in real_root.parents if folder.name == "snapshots"]
    allowed = [real_root, *(folder.parent / "blobs" for folder in snapshots)]
    if not any(resolved.is_relative_to(folder) for folder in allowed):
        raise _outside(file, str(resolved))
