"""DeepSpeed's file I/O for the tests, compiled once per version of DeepSpeed and torch.

`python tests/support/compiled_io.py` compiles it in some minutes. DeepSpeed keeps one build for all
environments of a user, and compiles it again when another environment asks. So tests load a build from a
separate folder, compile nothing, and are skipped without it. It needs libaio's headers
(`apt-get install libaio-dev`) and a C++ compiler.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PARTS = ("pin_memory", "async_io")
REASON = (
    "DeepSpeed's async_io is not compiled: apt-get install libaio-dev; python tests/support/compiled_io.py, "
    "for "
    "15 minutes"
)


def folder() -> Path:
    name = "-".join(f"{project}-{version(project)}" for project in ("torch", "deepspeed"))
    return Path.home() / ".cache" / "hfq-tests" / name


def is_built() -> bool:
    try:
        return all((folder() / name / f"{name}.so").exists() for name in PARTS)
    except PackageNotFoundError:
        return False


def use() -> None:
    """Makes DeepSpeed load the build in this process."""
    from torch.utils import cpp_extension

    cpp_extension.load = lambda name, **_: cpp_extension._import_module_from_library(
        name, str(folder() / name), True
    )


def build() -> None:
    os.environ |= {"TORCH_EXTENSIONS_DIR": str(folder()), "DS_ACCELERATOR": "cpu"}
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load()


if __name__ == "__main__":
    build()
