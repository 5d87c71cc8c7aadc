"""Tests of formats of other packages, which are found by their entry points.

Such a package is imported only for its own method. A broken package raises an error.
"""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig, SetupError
from hfq.formats import FORMATS, NotQuantizedFormatError, detect_formats
from hfq.formats.detection import plugins
from tests.support import programs, tiny_models
from tests.support.tiny_models import described

METHOD = "halves-of-tests"
SOURCE = programs.path("halves_of_tests").read_text()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(source, entry) adds a package with one entry point to the path, like pip."""
    formats = dict(FORMATS)

    def install(source: str = SOURCE, entry: str = f"{METHOD} = halves_of_tests") -> None:
        site = tmp_path / "site"
        info = site / "halves_of_tests-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "halves_of_tests.py").write_text(source)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halves-of-tests\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hfq.formats]\n{entry}\n")
        monkeypatch.syspath_prepend(str(site))

    yield install
    FORMATS.clear()
    FORMATS.update(formats)
    plugins._loaded.discard(METHOD)
    sys.modules.pop("halves_of_tests", None)


def halves() -> dict[str, torch.Tensor]:
    return {"halves": torch.ones(4, 8, dtype=torch.int8), "step": torch.tensor([0.5])}


def detect(method: object, tensors=None):
    tensors = halves() if tensors is None else tensors
    return detect_formats({"m": described("m", tensors)}, {} if method is None else {"quant_method": method})


def test_a_method_that_is_met_loads_its_format_and_the_format_reads(install):
    install()
    assert METHOD not in FORMATS
    found = detect(METHOD)["m"]
    assert found.describe() == "halves"
    assert METHOD in FORMATS
    assert torch.equal(found.dequantize(halves()), torch.full((4, 8), 0.5))


@pytest.mark.parametrize(
    "method", [None, "gptq", "modelopt", "hfq", "another-method", "", 5, ["halves-of-tests"]], ids=str
)
def test_without_its_method_a_format_is_not_imported(install, method):
    install("raise RuntimeError('imported')")
    with pytest.raises(NotQuantizedFormatError, match="Nothing was loaded"):
        detect(method)
    assert "halves_of_tests" not in sys.modules


def test_the_methods_of_hfq_itself_cannot_be_taken_over(install):
    install("raise RuntimeError('imported')", "gptq = halves_of_tests")
    with pytest.raises(NotQuantizedFormatError):
        detect("gptq")


def test_a_format_is_imported_once(install):
    install(
        f"import builtins\nbuiltins.imports_of_tests = getattr(builtins, 'imports_of_tests', 0) + 1\n{SOURCE}"
    )
    detect(METHOD)
    sys.modules.pop("halves_of_tests")
    assert detect(METHOD)["m"].describe() == "halves"
    assert __builtins__["imports_of_tests"] == 1
    del __builtins__["imports_of_tests"]


@pytest.mark.parametrize(
    ("source", "entry", "cause"),
    [
        ("raise RuntimeError('no such GPU')", f"{METHOD} = halves_of_tests", "RuntimeError: no such GPU"),
        ("import a_module_of_no_one", f"{METHOD} = halves_of_tests", "ModuleNotFoundError"),
        ("x = (", f"{METHOD} = halves_of_tests", "SyntaxError"),
        (SOURCE, f"{METHOD} = a_module_of_no_one", "ModuleNotFoundError"),
        (SOURCE, f"{METHOD} = halves_of_tests:Quarters", "AttributeError"),
        (
            SOURCE.replace('name = "halves-of-tests"', 'name = "gptq"'),
            f"{METHOD} = halves_of_tests",
            "two formats are named 'gptq'",
        ),
    ],
    ids=["raises", "needs another package", "no python", "no module", "no such name", "a name that is taken"],
)
def test_a_broken_format_is_an_error_of_the_setup_with_its_cause(install, source, entry, cause):
    install(source, entry)
    with pytest.raises(
        SetupError, match=rf"(?s)quant_method='{METHOD}' cannot be loaded.*{cause}.*Fix: "
    ) as caught:
        detect(METHOD)
    assert caught.value.__cause__ is not None
    with pytest.raises(SetupError):
        detect(METHOD)


def test_a_method_without_a_package_is_refused_by_its_name():
    with pytest.raises(NotQuantizedFormatError, match=f"quant_method='{METHOD}'"):
        detect(METHOD)


def test_a_model_of_another_packages_dialect_loads_from_disk_and_is_saved_back(install, tmp_path):
    install()
    exec(SOURCE, namespace := {})
    packed = namespace["Halves"]()
    FORMATS.pop(METHOD)
    path = tiny_models.write_model(
        tmp_path / "model", tiny_models.model_tensors(packed), {"quant_method": METHOD}
    )
    tokens = torch.tensor([[1, 5, 9]])
    found = {}
    for home in ("cpu", "disk"):
        model = AutoModelForCausalLM.from_pretrained(
            path, quantization_config=HfqConfig(), dtype=torch.float32, device_map={"": home}
        )
        found[home] = model(input_ids=tokens).logits
    assert torch.equal(found["cpu"], found["disk"])
    model.save_pretrained(tmp_path / "saved")
    digests = tiny_models.digests(path)
    packed_names = [name for name in digests if name.endswith(("halves", "step"))]
    assert len(packed_names) == 28
    assert all(tiny_models.digests(tmp_path / "saved")[name] == digests[name] for name in packed_names)
