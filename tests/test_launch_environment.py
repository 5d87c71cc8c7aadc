"""The environment of a launched program: its switch, its options, and its record."""

import json

import pytest

from hfq import launch_environment
from hfq.errors import SetupError
from hfq.launch_environment import CONFIG, ENABLE, RECORD, is_enabled, read_options, record, say


@pytest.mark.parametrize(("value", "is_on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_only_a_value_enables_hfq(monkeypatch, value, is_on):
    monkeypatch.delenv(ENABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(ENABLE, value)
    assert is_enabled() is is_on


def test_options_are_an_object_or_a_file(tmp_path):
    options = {"device_map": {"": "cpu"}, "disk_io": "direct"}
    file = tmp_path / "options.json"
    file.write_text(json.dumps(options))
    assert read_options(json.dumps(options)) == read_options(str(file)) == options
    assert read_options("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{device_map: disk}", f"The options in {CONFIG} are not valid JSON."),
        pytest.param('{"a":' * 100_000, f"The options in {CONFIG} are not valid JSON.", id="nested"),
        ("nowhere.json", f"The options in {CONFIG} cannot be read."),
        (["disk"], "The options in {file} are not a JSON object."),
    ],
)
def test_other_texts_are_errors_with_a_fix(tmp_path, text, message):
    file = tmp_path / "list.json"
    file.write_text(json.dumps(text))
    is_file = isinstance(text, list)
    with pytest.raises(SetupError) as raised:
        read_options(str(file) if is_file else text, str(file) if is_file else CONFIG)
    assert raised.value.message == message.format(file=file)
    assert raised.value.fix.startswith(("Pass a file", "Write the options"))


def test_the_first_rank_speaks_and_control_characters_are_escaped(monkeypatch, capsys):
    say("loaded a\x1b[2Jb.")
    monkeypatch.setenv("RANK", "1")
    say("loaded again.")
    assert capsys.readouterr().err == "hfq: loaded a\\x1b[2Jb.\n"


def test_a_record_is_appended_to_and_never_created(monkeypatch, tmp_path):
    file = tmp_path / "record"
    monkeypatch.setenv(RECORD, str(file))
    record("lost")
    assert not file.exists()
    file.write_text("")
    record("one")
    record("two")
    assert file.read_text() == "one\ntwo\n"
    monkeypatch.delenv(RECORD)
    record("three")
    assert file.read_text() == "one\ntwo\n"


def test_a_closed_standard_error_is_no_error(monkeypatch):
    class Closed:
        def write(self, text):
            raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(launch_environment.sys, "stderr", Closed())
    say("loaded.")
