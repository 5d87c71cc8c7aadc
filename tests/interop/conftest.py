"""Process in which readers of other projects load checkpoints without hfq."""

import subprocess

import pytest

from tests.support import programs


@pytest.fixture(scope="module")
def stock_digest(tmp_path_factory):
    """stock_digest(path, flag="") → digest of the logits in plain transformers.

    The flag can request an import of hfq.
    """
    environment, readers = programs.environment(GPTQMODEL_CPU_WORKERS="2"), {}
    errors = tmp_path_factory.mktemp("stock") / "stderr"

    def stock_digest(path, flag="") -> str:
        if flag not in readers:
            command = programs.command("stock_digests", flag)
            with open(errors, "a") as stream:
                readers[flag] = subprocess.Popen(
                    command, stdin=-1, stdout=-1, stderr=stream, text=True, env=environment
                )
        print(path, file=readers[flag].stdin, flush=True)
        for line in readers[flag].stdout:
            if line.startswith("digest"):
                return line
        readers.pop(flag).wait(60)  # it ended, and the next test starts another
        raise AssertionError(errors.read_text()[-3000:])

    yield stock_digest
    for reader in readers.values():
        reader.communicate(timeout=60)
