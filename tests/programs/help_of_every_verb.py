"""Asks every verb for its help, which must import no torch; prints the verbs."""

import sys

from hfq.cli.main import app, main

verbs = [command.name for command in app.registered_commands]
for verb in [None, *verbs]:
    sys.argv = ["hfq", *([verb] if verb else []), "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, verb
    assert not {"torch", "transformers", "numpy"} & set(sys.modules), verb
print(*verbs)
