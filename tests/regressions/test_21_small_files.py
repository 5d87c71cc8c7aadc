"""Tests that files which a user names are read up to a limit, and that no file hangs or ends a command."""

import contextlib
import itertools
import json
import os
import signal
import sys

import pytest

from hfq.checkpoint.index import Checkpoint
from hfq.checkpoint.small_file import open_regular, read_small_file, read_yaml
from hfq.errors import HfqError, SetupError
from hfq.integrations.deepspeed.config_check import check_config
from hfq.placement.estimate.catalog import SHIPPED, read_catalog
from hfq.placement.estimate.profile import read_profile
from hfq.plots.fields import read_json

READERS = {"catalog": read_catalog, "report": read_json, "profile": read_profile, "config": check_config}
SUFFIXES = {"catalog": ".yaml", "report": ".json", "profile": ".json", "config": ".json"}


@pytest.fixture(autouse=True)
def alarm():
    """Ends a test that waits for a pipe or reads without end."""

    def stop(*_):
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


@pytest.mark.parametrize("kind", [pipe, device, folder], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_not_regular_is_refused(tmp_path, reader, kind):
    path = tmp_path / f"file{SUFFIXES[reader]}"
    kind(path)
    with pytest.raises(SetupError) as caught:
        READERS[reader](path)
    assert caught.value.file == path


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")


def test_no_more_than_the_limit_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_small_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes is more than the limit of 4"):
        read_small_file(tmp_path / "file", 4)


def test_a_report_of_zeros_or_of_brackets_is_refused(tmp_path):
    for content in (b"\0" * 1000, b"[" * 100_000, b"\xff"):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(SetupError):
            read_json(tmp_path / "file")


# catalogs

LEVELS = "abcdefghi"
BOMB = "a: &a [1, 1]\n" + "".join(
    f"{level}: &{level} [{', '.join([f'*{lower}'] * 9)}]\n" for lower, level in itertools.pairwise(LEVELS)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{level}: &{level} {{<<: [{', '.join([f'*{lower}'] * 9)}]}}\n"
    for lower, level in itertools.pairwise(LEVELS)
)
CIRCLE = "date: &a [*a]\ngpus: {}\nmachines: []\n"
MACHINE = {
    "name": "m",
    "gpus": [],
    "cpu": "8GB",
    "memory_rate": "1GB",
    "link_rate": None,
    "disk_rate": "1GB",
    "cost": 1,
    "source": "s",
}
GOOD = {"date": "2026", "gpus": {"L4": {"memory": "24GB", "memory_rate": "300GB"}}, "machines": [MACHINE]}
WRONG = [None, 3, 1.5, True, "x", [], ["x"], [[1]], {}, {"x": 1}, 10**5000]


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))  # JSON is YAML
    return path


def test_the_shipped_catalog_and_a_small_one_are_read(tmp_path):
    assert read_catalog(SHIPPED).machines
    assert read_catalog(write(tmp_path / "catalog.yaml", GOOD)).machines[0].name == "m"


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "",
        "\0",
        "- 1",
        "!!python/object:os.system {}",
        "[" * 5000,
        "date: 2026-99-99",
        "a: " + "9" * 5000,
    ],
    ids=range(8),
)
def test_a_catalog_that_is_no_catalog_is_refused(tmp_path, text):
    with pytest.raises(SetupError, match="The catalog cannot be"):
        read_catalog(write(tmp_path / "catalog.yaml", text))


def test_few_aliases_are_read(tmp_path):
    assert read_yaml(write(tmp_path / "catalog.yaml", "a: &a [1, 2]\nb: *a")) == {"a": [1, 2], "b": [1, 2]}
    with pytest.raises(ValueError, match="items"):
        read_yaml(write(tmp_path / "catalog.yaml", BOMB))


@pytest.mark.parametrize("field", ["date", "gpus", "machines"])
def test_wrong_types_in_a_catalog_are_refused_or_read(tmp_path, field):
    for value in WRONG:
        _read_or_refuse(tmp_path, {**GOOD, field: value})


@pytest.mark.parametrize("field", MACHINE)
def test_wrong_types_in_a_machine_are_refused_or_read(tmp_path, field):
    for value in WRONG:
        _read_or_refuse(tmp_path, {**GOOD, "machines": [{**MACHINE, field: value}]})


@pytest.mark.parametrize("field", ["memory", "memory_rate"])
def test_wrong_types_in_an_accelerator_are_refused_or_read(tmp_path, field):
    for value in WRONG:
        gpu = {**GOOD["gpus"]["L4"], field: value}
        _read_or_refuse(tmp_path, {**GOOD, "gpus": {"L4": gpu}, "machines": [{**MACHINE, "gpus": ["L4"]}]})


@pytest.mark.parametrize("text", ["gpus: {1: {}}", "gpus: []", "gpus: 1", "machines: 3", "machines: null"])
def test_containers_of_a_wrong_type_are_named(tmp_path, text):
    field = text.partition(":")[0]
    rest = [f"{name}: {json.dumps(value)}" for name, value in GOOD.items() if name != field]
    with pytest.raises(SetupError) as caught:
        read_catalog(write(tmp_path / "catalog.yaml", "\n".join([text, *rest])))
    assert field in caught.value.found


def _read_or_refuse(tmp_path, value):
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        path = write(tmp_path / "catalog.yaml", value)
    finally:
        sys.set_int_max_str_digits(limit)
    with contextlib.suppress(SetupError):
        assert isinstance(read_catalog(path).date, str)


# checkpoints


def test_a_pipe_as_an_index_is_refused_while_nobody_writes_to_it(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(HfqError, match="JSON file of the checkpoint cannot be read"):
        Checkpoint.open(tmp_path)
