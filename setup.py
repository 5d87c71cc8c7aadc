"""Every fact about the package; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "hfq" / "version.py").read_text(encoding="utf-8"), re.MULTILINE
)[1]
TEST = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "peft>=0.21", "optimum>=2.0", "gguf>=0.17"]

setup(
    name="hfq",
    version=VERSION,
    description="Run quantized LLMs that do not fit in memory, with bit-identical results in every placement",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The hfq contributors",
    keywords=[
        "quantization",
        "transformers",
        "offloading",
        "llm",
        "gptq",
        "awq",
        "fp8",
        "gguf",
        "safetensors",
        "deepspeed",
        "peft",
    ],
    license="Apache-2.0",
    license_files=["LICENSE"],
    # makes an editable install put the clone on sys.path. An import hook would lose to a folder named hfq
    package_dir={"": "."},
    packages=find_packages(include=["hfq", "hfq.*"]),
    package_data={
        "hfq": [
            "py.typed",
            "kernels/cpp/src/*.cpp",
            "kernels/cpp/src/*.h",
            "placement/estimate/*.yaml",
            "plots/*.jinja",
        ]
    },
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11",
        "transformers>=5.17,<6",
        "accelerate>=1.10",
        "safetensors>=0.8",
        "pyyaml>=6",
        "typer>=0.18",
        "rich>=13",
    ],
    extras_require={
        "deepspeed": ["deepspeed>=0.19"],
        "peft": ["peft>=0.21"],
        "fms": ["ibm-fms>=1.13,<1.14"],
        "triton": ["triton>=3.6"],
        "gguf": ["gguf>=0.17"],  # transformers reads configs and tokenizers of GGUF files with it
        "serve": ["transformers[serving]"],
        "quantize": ["optimum>=2.0"],
        # the clang of older versions does not take 512-bit vectors under -mcpu=baseline
        "compiler": ["ziglang>=0.17.1"],
        "plots": ["matplotlib>=3.8", "jinja2>=3.1"],
        "docs": [
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6",
            "mkdocstrings[python]>=0.30",
            "nbclient>=0.10",
            "ipykernel>=6.29",
        ],
        "test": TEST,
        "release": ["build>=1.2", "twine>=6"],
        "dev": [*TEST, "codespell>=2.4", "ruff>=0.12", "mypy>=1.15", "import-linter>=2.3", "build>=1.2"],
    },
    entry_points={"console_scripts": ["hfq=hfq.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Libraries :: Python Modules",
        "Typing :: Typed",
    ],
)
