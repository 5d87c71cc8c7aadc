"""The words of the command line: verbs, help lines, and options; and the old words, which are errors."""

import json

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from hfq.cli import inspect, main, quantize
from hfq.cli.main import app
from tests.support import tiny_models

GPTQ = str(tiny_models.DATA / "tiny-llama-gptq")

HELP = {
    "inspect": "Show formats, bits per weight, and size of a checkpoint.",
    "plan": "Predict memory use and speed before loading a model.",
    "formats": "List supported and unsupported formats.",
    "doctor": "Check this machine, a checkpoint, or a launcher config for problems.",
    "env": "Check this machine, a checkpoint, or a launcher config for problems.",
    "profile-machine": "Measure this machine so that `plan` can predict speed.",
    "bench": "Measure load time, memory, and tokens per second.",
    "quantize": "Quantize a checkpoint and save it in a standard format.",
    "convert": "Change the format without changing any weight.",
    "reshard": "Write one aligned shard per decoder layer for faster offloading.",
    "evaluate": "Measure perplexity and divergence from a reference.",
    "compare": "Check whether two checkpoints or placements are the same model.",
    "plot": "Draw charts from JSON results.",
    "demo": "Run a model that does not fit in memory.",
    "launch": "Run any program with hfq enabled.",
    "chat": "Chat with a model.",
    "serve": "Serve an OpenAI-compatible API.",
}

LOAD_OPTIONS = (
    "--config --device-map --max-memory --offload-folder --quantize-weights --quantize-output-head --modules-to-not-convert "
    "--quantize-activations --llm-int8-threshold --kernel --cpu-memory --disk-io --disk-checksum "
    "--expert-cache-size --execute-cpu-layers-on --reader-ranks --nvme-source"
)

OPTIONS = {
    "inspect": "MODEL --revision --kernels --json",
    "plan": (
        "MODEL --revision --gpu --cpu --disk --profile --catalog --suggest-format --batch-size "
        "--max-model-len "
        "--quantize-output-head --kv-cache-dtype --kv-cache-device --num-assistant-tokens --acceptance-rate --routing --dtype --output-dir --json --zero-stage --num-processes "
        "--num-machines "
        "--nvme-path "
        "--offload-param-device --offload-optimizer-device --optimizer --lora-rank --lora-target "
        "--parameters "
        "--trainable"
    ),
    "formats": "--markdown",
    "doctor": "MODEL --revision --config --clean --json",
    "env": "MODEL --revision --config --clean --json",
    "profile-machine": "MODEL --revision --folder --output-file --num-processes --json --quick",
    "bench": (
        "MODEL --revision --device-map --max-memory --dtype --n-prompt --n-gen --threads --repetitions --compile --json"
    ),
    "quantize": (
        "MODEL OUT --revision --method --bits --group-size --sym --desc-act --static-groups --clip-search "
        "--damp-percent --distill-steps --modules-to-not-convert --dataset --num-calibration-samples "
        "--max-seq-length --push-to-hub --private --trust-remote-code --json"
    ),
    "convert": "MODEL OUT --to --template --revision --push-to-hub --private --json",
    "reshard": "MODEL OUT --revision --push-to-hub --private --json",
    "evaluate": (
        "MODEL... --text --revision --reference --reference-revision --max-seq-length --stride --batch-size "
        "--device-map --dtype --trust-remote-code --json --output-dir"
    ),
    "compare": (
        "A B --revision-a --revision-b --device-map-a --device-map-b --text --logits --trust-remote-code --json"
    ),
    "plot": "FILE... --output-dir --html",
    "demo": "--size --folder --json",
    "launch": f"PROGRAM... {LOAD_OPTIONS}",
    "chat": f"MODEL ARGS... {LOAD_OPTIONS}",
    "serve": f"MODEL ARGS... {LOAD_OPTIONS}",
}

OLD_VERBS = ("calibrate", "eval", "verify", "pack", "report")

OLD_OPTIONS = {
    "plan": (
        "--nvme --budget --batch --context --kv-dtype --launcher --out --zero --ranks --ranks-per-node "
        "--offload-param --offload-optimizer"
    ),
    "profile-machine": "--ranks --out",
    "quantize": (
        "--num-bits --symmetric --asymmetric --act-order --damping --recovery --skip --calibration "
        "--samples --sequence-length"
    ),
    "evaluate": "--sequence-length --batch --placement --out",
    "compare": "--placement-a --placement-b",
    "plot": "--out",
}


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def test_the_verbs_are_these():
    assert set(get_command(app).commands) == set(HELP)


@pytest.mark.parametrize("verb", HELP)
def test_a_help_page_has_its_line_its_options_and_an_example(verb):
    command = get_command(app).commands[verb]
    named = [
        parameter.opts[-1] if parameter.param_type_name == "option" else parameter.metavar
        for parameter in command.params
    ]
    assert sorted(named) == sorted(OPTIONS[verb].split())
    pages = [run(verb, option).stdout for option in ("-h", "--help")]
    assert pages[0] == pages[1]
    assert f"\n  {HELP[verb]}\n" in pages[0]
    example = pages[0].rstrip().splitlines()[-1].split()
    assert pages[0].rstrip().splitlines()[-2].strip() == "Example:"
    assert example[:2] == ["hfq", "doctor" if verb == "env" else verb]
    assert {word for word in example if word.startswith("--")} <= set(OPTIONS[verb].split())


def test_the_list_of_verbs_has_every_help_line_in_full():
    page = run("-h").stdout
    for verb, line in HELP.items():
        assert (f"  {verb} " in page) == (verb != "env")
        assert line in " ".join(page.split())
    assert page.rstrip().splitlines()[-2].strip() == "Example:"


@pytest.mark.parametrize("verb", OLD_VERBS)
def test_no_old_verb_works(verb):
    done = run(verb, GPTQ)
    assert done.exit_code == 2
    assert f"hfq has no verb {verb!r}." in done.stderr


@pytest.mark.parametrize(
    ("verb", "option"),
    [(verb, option) for verb, options in OLD_OPTIONS.items() for option in options.split()],
)
def test_no_old_option_works(verb, option):
    done = run(verb, option, "1")
    assert done.exit_code == 2
    assert f"hfq {verb} has no option {option}." in done.stderr


@pytest.mark.parametrize("verb", ["inspect", "plan", "doctor", "bench", "quantize", "convert", "reshard"])
def test_a_revision_is_an_option_and_no_part_of_the_name(verb, tmp_path):
    rest = {"quantize": [tmp_path / "out"], "reshard": [tmp_path / "out"]}.get(verb, [])
    rest = [tmp_path / "out", "--to", "gptq_v2"] if verb == "convert" else rest
    done = run(verb, "organization/model@v1", *rest)
    assert (done.exit_code, done.exception.fix) == (1, "Pass organization/model --revision v1.")
    done = run(verb, GPTQ, *rest, "--revision", "v1")
    assert (done.exit_code, done.exception.fix) == (1, "Leave out --revision.")


def test_an_interruption_ends_with_130_and_one_line(monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "model_headers", interrupted)
    done = run("inspect", GPTQ)
    assert (done.exit_code, done.stderr) == (130, "Interrupted. Run the same command again.\n")
    monkeypatch.setattr(quantize, "model_folder", interrupted)
    done = run("quantize", GPTQ, tmp_path / "out", "--method", "rtn")
    assert done.exit_code == 130
    assert done.stderr == (
        "Interrupted. Run the same command again: it continues after the last finished decoder layer.\n"
    )
    monkeypatch.setattr("sys.argv", ["hfq", "inspect", GPTQ])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


@pytest.mark.parametrize(
    "arguments",
    [("inspect", GPTQ), ("plan", GPTQ, "--cpu", "1GB"), ("plan", GPTQ, "--zero-stage", "2"), ("doctor",)],
    ids=lambda arguments: arguments[0],
)
def test_json_is_one_object_with_keys_in_snake_case(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = json.loads(run(*arguments, "--json").stdout)
    assert isinstance(report, dict)
    assert all(key.isidentifier() and key.islower() for key in report)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", GPTQ, GPTQ, "--device-map-a", "dsk"), "--device-map-a dsk is not a device map."),
        (
            ("evaluate", GPTQ, "--text", "none", "--device-map", "dsk"),
            "--device-map dsk is not a device map.",
        ),
        (("evaluate", GPTQ, "--text", "none", "--dtype", "int8"), "--dtype int8 is not valid."),
        (("plan", GPTQ, "--gpu", "rtx4090"), "--gpu rtx4090 is not a size."),
        (("quantize", GPTQ, "out", "--bits", "5"), "--bits 5"),
        (("quantize", GPTQ, "out", "--method", "awq", "--desc-act"), "--desc-act"),
    ],
)
def test_an_error_names_the_option_as_typed(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == (2 if arguments[0] == "compare" else 1)
    assert message in capsys.readouterr().err


def test_a_shell_completes_verbs_and_options():
    def completed(line):
        words = {"_HFQ_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        return CliRunner().invoke(app, [], prog_name="hfq", env=words).stdout.split()

    assert completed("hfq qu") == ["quantize"]
    assert set(completed("hfq inspect --k")) == {"--kernels"}


def test_the_list_of_verbs_cuts_no_help_line_at_80_columns():
    page = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    assert "..." not in page.replace("[ARGS]...", "")
    assert all(line in " ".join(page.split()) for line in HELP.values())
