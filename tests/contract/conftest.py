"""Parametrization of the contract tests, which run once for each case."""

import pytest
import torch

from hfq.checkpoint import Checkpoint
from hfq.formats import detect_formats, tensors_by_module
from hfq.formats.configs.source_config import detection_hints
from tests.contract.cases import CASES, REPRESENTATIVES, Case
from tests.support import models, tiny_models


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        indexed = "indexed_tensors" in metafunc.fixturenames
        cases = [
            case for case in CASES if not indexed or "g_idx" in case.format.quantize(torch.randn(128, 128))
        ]
        metafunc.parametrize("case", cases, ids=lambda case: case.id, scope="session")


@pytest.hookimpl(tryfirst=True)  # runs before pytest evaluates the markers
def pytest_collection_modifyitems(items):
    for item in items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if isinstance(case, Case) and case.id not in REPRESENTATIVES:
            item.add_marker("every_dialect")
            if item.get_closest_marker("once_each_format"):
                item.add_marker("slow")


@pytest.fixture(scope="session")
def tensors(case):
    return tiny_models.model_tensors(case.format)


@pytest.fixture(scope="session")
def indexed_tensors(tensors):
    """Returns the tensors of formats with an index tensor."""
    return tensors


@pytest.fixture(scope="session")
def checkpoint(case, tensors, tmp_path_factory):
    return write(tmp_path_factory.mktemp(case.id), tensors, case)


def write(folder, tensors, case):
    return tiny_models.write_model(
        folder, tensors, case.config, tiny_models.schemas(tensors, case.schema), case.kind
    )


@pytest.fixture(scope="session")
def detected(case, checkpoint):
    """Returns {module: (resolved format, tensors)} of the written checkpoint."""
    opened, stored = Checkpoint.open(checkpoint), tiny_models.stored_tensors(checkpoint)
    modules = tensors_by_module(opened.tensors)
    found = {}
    for module, weight_format in detect_formats(modules, detection_hints(opened, case.config)).items():
        tensors = {local: stored[info.name] for local, info in modules[module].items()}
        size = tiny_models.size_of(module)
        found[module] = weight_format.sized(size[1], size[0]).resolve(module, tensors), tensors
    return found


@pytest.fixture(scope="session")
def load():
    return models.load
